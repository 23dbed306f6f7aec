"""Images on their way to a device, and results on their way back; all calls to a device for tiles
are in this file.

Python issues the work of a card faster than the card does it. A copy between memory of the host
whose pages are locked and the card, on a stream of its own, goes on while the card computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class PendingResult(Protocol):
    """A result on its way to the host."""

    def wait(self) -> Tensor:
        """The result, when it is there."""
        ...


class TileTransfer(Protocol):
    """Both ways between the host and one device."""

    def there(self, images: Tensor) -> Tensor:
        """``images`` of the host on the device, for whatever is issued from now on."""
        ...

    def back(self, result: Tensor) -> PendingResult:
        """Begin to bring what was issued so far to the host."""
        ...


@dataclass(frozen=True)
class _ReadyResult:
    result: Tensor

    def wait(self) -> Tensor:
        return self.result


@dataclass(frozen=True)
class SyncTileTransfer:
    """Whoever asks for a copy waits until it is made."""

    device: str

    def there(self, images: Tensor) -> Tensor:
        """A copy, or the images themselves where they are already."""
        return images.to(self.device)

    def back(self, result: Tensor) -> PendingResult:
        """Waits for the computation too."""
        return _ReadyResult(result.cpu())


@dataclass(frozen=True)
class _CopiedResult:
    result: Tensor
    copied: Any

    def wait(self) -> Tensor:
        self.copied.synchronize()
        return self.result


class AsyncTileTransfer:
    """One CUDA device: a stream for copies to it and one for copies from it.

    Locked memory is PyTorch's, which uses it again when the copies that were issued from and to it
    are done.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._to, self._from = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)

    def there(self, images: Tensor) -> Tensor:
        """The current stream waits for the copy, Python does not."""
        staged = _locked(images)
        staged.copy_(images)
        with torch.cuda.device(self._device), torch.cuda.stream(self._to):
            given = torch.empty_like(staged, device=self._device)
            given.copy_(staged, non_blocking=True)
            copied = self._to.record_event()
        working = torch.cuda.current_stream(self._device)
        working.wait_event(copied)
        # Its memory is that of another stream, which would use it again too early.
        given.record_stream(working)
        return given

    def back(self, result: Tensor) -> PendingResult:
        """The copy begins when what was issued before is done."""
        self._from.wait_event(torch.cuda.current_stream(self._device).record_event())
        made = _locked(result)
        with torch.cuda.device(self._device), torch.cuda.stream(self._from):
            made.copy_(result, non_blocking=True)
            copied = self._from.record_event()
        result.record_stream(self._from)
        return _CopiedResult(made, copied)


def _locked(like: Tensor) -> Tensor:
    """Memory of the host whose pages are locked, in the order of ``like``."""
    return torch.empty_like(like, device="cpu", pin_memory=True)
