"""One batch of tiles through the network, from values of the source to results.

Probes run the same step. On a GPU tiles are copied to and from pinned memory on a stream of their
own, which overlaps computation: Python launches the work of a GPU faster than the GPU executes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import NotFiniteError
from lowtide.core.option import Precision
from lowtide.core.signal import ValueAdapter
from lowtide.streaming.tiles.network import RunnableNetwork

# What most of a network's layers compute in; inputs and outputs are fp32.
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class PendingBatch:
    """A batch in flight: its values, its input, and the pending result with its sum."""

    values: np.ndarray | None
    inputs: Tensor
    result: PendingResult
    result_sum: PendingResult


class NetworkTileRunner:
    """Runs equal tiles through a network, converted by an adapter.

    A call is `begin` followed by `finish`. With an asynchronous ``transfer``, Python continues
    while the device works, so that more tiles are started before the first ones are finished.
    """

    def __init__(
        self, network: RunnableNetwork, adapter: ValueAdapter, transfer: TileTransfer | None = None
    ) -> None:
        self.network = network
        self.adapter = adapter
        self._transfer = transfer or SyncTileTransfer(network.device)
        self.fp32_reruns = 0

    def __call__(self, tiles: Sequence[np.ndarray]) -> np.ndarray:
        """Run (H, W, C) tiles of the source; return float32 (B, H·s, W·s, C)."""
        return self.finish(self.begin(tiles))

    @torch.inference_mode()
    def begin(self, tiles: Sequence[np.ndarray]) -> PendingBatch:
        """Start the network on the tiles, which are not read again."""
        values = np.stack(tiles)
        inputs = torch.from_numpy(self.adapter.to_network(values))
        result = self.network.forward(self._on_device(inputs))
        # NaN and infinity survive a sum, so finiteness is checked without a copy of the whole
        # result.
        return PendingBatch(
            None if self.adapter.context is None else values,
            inputs,
            self._transfer.to_host(result),
            self._transfer.to_host(result.sum()),
        )

    @torch.inference_mode()
    def finish(self, pending: PendingBatch) -> np.ndarray:
        """Wait for the result of a batch. Raises `NotFiniteError`."""
        network = self.network
        total, result = pending.result_sum.wait(), pending.result.wait()
        if not total.isfinite() and network.make_fp32_forward is not None:
            self.fp32_reruns += 1
            result = network.make_fp32_forward()(self._on_device(pending.inputs)).cpu()
            total = result.sum()
        if not total.isfinite():
            raise NotFiniteError
        return self.adapter.from_network(result.numpy(), pending.values)

    def _on_device(self, inputs: Tensor) -> Tensor:
        """Return the network's input, on its device and in its memory format."""
        images = self._transfer.to_device(inputs)
        return images.contiguous(memory_format=self.network.memory_format)


@dataclass(frozen=True)
class PendingResult:
    """A result, such as (B, C, H * scale, W * scale), on its way to the host.

    ``copy_event`` is that of its copy, None where it is there.
    """

    result: Tensor
    copy_event: Any = None

    def wait(self) -> Tensor:
        """Wait for the result, and return it."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
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
        return PendingResult(result.cpu())


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
        return PendingResult(pinned, copied)


TileTransfer = SyncTileTransfer | AsyncTileTransfer


def _empty_pinned(like: Tensor) -> Tensor:
    """Allocate pinned memory in the memory format of ``like``."""
    return torch.empty_like(like, device="cpu", pin_memory=True)


# Tensor cores take channels in groups of so many 16-bit numbers.
_CHANNEL_GROUP = 8


def in_memory_format(network: RunnableNetwork) -> RunnableNetwork:
    """Return ``network`` with channels-last inputs if `takes_channels_last`."""
    return replace(network, channels_last=takes_channels_last(network))


def takes_channels_last(network: RunnableNetwork) -> bool:
    """Return whether ``network`` takes channels-last inputs.

    On the CPU if it has convolutions: of 27 kinds of networks none took more than 1.02 of the time
    that it took with its channels first, and those of convolutions alone 0.7 to 0.95.

    On a GPU if most weights of its convolutions are of layers that run on tensor cores, which is in
    16 bits and with a multiple of 8 channels on both sides: cuDNN's kernels for them read channels
    last, and rearrange what comes in the other order. In fp32 channels stay first: whether TF32 is
    allowed is a setting that a program may change at any time. This is NVIDIA's advice for its
    libraries; it has not been measured here.

    Source: NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs NHWC".
    """
    forward = network.forward
    if not isinstance(forward, torch.nn.Module):
        return False
    weights = [weight for weight in forward.parameters() if weight.dim() == 4]
    if network.device == "cpu":
        return bool(weights)
    if network.precision == "fp32":
        return False
    suited = sum(weight.numel() for weight in weights if _suits_tensor_cores(weight))
    return 2 * suited > sum(weight.numel() for weight in weights)


def _suits_tensor_cores(weight: Tensor) -> bool:
    """Return whether a convolution (out, in of a group, H, W) has channels in whole groups."""
    return all(channels % _CHANNEL_GROUP == 0 for channels in weight.shape[:2])
