"""Asynchronous copies of tiles between a device and pinned host memory.

All device calls for tiles are in this file. Python launches the work of a GPU faster than the GPU
executes it. A copy between pinned memory and the GPU on its own stream overlaps computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class PendingResult(Protocol):
    """A result in flight to the host."""

    def wait(self) -> Tensor:
        """Wait for the result, such as (B, C, H * scale, W * scale), and return it."""
        ...


class TileTransfer(Protocol):
    """Copies images to one device and results back."""

    def to_device(self, images: Tensor) -> Tensor:
        """Copy images (B, C, H, W) to the device, ready for all work issued from now on."""
        ...

    def to_host(self, result: Tensor) -> PendingResult:
        """Start the copy of a result of any shape to the host, after issued work."""
        ...


@dataclass(frozen=True)
class _ReadyResult:
    result: Tensor

    def wait(self) -> Tensor:
        return self.result


@dataclass(frozen=True)
class SyncTileTransfer:
    """Synchronous copies: each call waits for its copy."""

    device: str

    def to_device(self, images: Tensor) -> Tensor:
        """Return a copy of (B, C, H, W) on the device, or the images if they are there."""
        return images.to(self.device)

    def to_host(self, result: Tensor) -> PendingResult:
        """Copy a result of any shape, which waits for the computation too."""
        return _ReadyResult(result.cpu())


@dataclass(frozen=True)
class _CopiedResult:
    result: Tensor
    copy_event: Any

    def wait(self) -> Tensor:
        self.copy_event.synchronize()
        return self.result


class AsyncTileTransfer:
    """Copies of one CUDA device, with one stream in each direction.

    Pinned memory comes from PyTorch's caching allocator, which reuses it once the copies issued
    from and to it are done.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._upload_stream, self._download_stream = (
            torch.cuda.Stream(self._device),
            torch.cuda.Stream(self._device),
        )

    def to_device(self, images: Tensor) -> Tensor:
        """Start the copy of (B, C, H, W), for which only the current stream waits."""
        pinned = _empty_pinned(images)
        pinned.copy_(images)
        with torch.cuda.device(self._device), torch.cuda.stream(self._upload_stream):
            device_images = torch.empty_like(pinned, device=self._device)
            device_images.copy_(pinned, non_blocking=True)
            copied = self._upload_stream.record_event()
        current_stream = torch.cuda.current_stream(self._device)
        current_stream.wait_event(copied)
        # Allocated on another stream, which would otherwise reuse the memory too early.
        device_images.record_stream(current_stream)
        return device_images

    def to_host(self, result: Tensor) -> PendingResult:
        """Start the copy of a result of any shape once the work issued before is done."""
        self._download_stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        pinned = _empty_pinned(result)
        with torch.cuda.device(self._device), torch.cuda.stream(self._download_stream):
            pinned.copy_(result, non_blocking=True)
            copied = self._download_stream.record_event()
        result.record_stream(self._download_stream)
        return _CopiedResult(pinned, copied)


def _empty_pinned(like: Tensor) -> Tensor:
    """Allocate pinned memory in the memory format of ``like``."""
    return torch.empty_like(like, device="cpu", pin_memory=True)
