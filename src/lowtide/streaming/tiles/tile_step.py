"""One batch of tiles through the network, from image samples to results.

Probes run the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import NotFiniteError
from lowtide.core.precision import Precision
from lowtide.core.signal import ImageInfo
from lowtide.streaming.tiles.image_adapter import ChannelPlan
from lowtide.streaming.tiles.tile_transfer import PendingResult, SyncTileTransfer, TileTransfer

Forward = Callable[[Tensor], Tensor]
# What most of a network's layers compute in; inputs and outputs are fp32.
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.float32,
    "fp8": torch.bfloat16,
}
_FULL_SCALE = {"uint8": 255, "uint16": 65535, "float32": 1}


@dataclass(frozen=True)
class NetworkSpec:
    """A model as the runner needs it: a function on (B, C, H, W), with metadata.

    Input values are in 0..1.
    Attributes:
        forward: Takes sizes that already satisfy the model's size rule, on ``device``, and returns
            values that need no clamping, both in fp32 whatever it computes in.
        scale: Output pixels per input pixel, along each axis.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        device: Where it runs.
        precision: What most of its layers compute in.
        channels_last: Whether inputs are channels-last.
        make_fp32_forward: Returns the same model in fp32 where ``precision`` is another, to redo a
            tile whose low-precision result is not finite.
        free_memory: Frees what the network keeps between calls. For networks that do not allocate
            with PyTorch, whose memory only shows in the process's resident memory.
    """

    forward: Forward
    scale: int
    in_channels: int
    out_channels: int
    device: str = "cpu"
    precision: Precision = "fp32"
    channels_last: bool = False
    make_fp32_forward: Callable[[], Forward] | None = None
    free_memory: Callable[[], None] | None = None

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of its inputs."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class PendingBatch:
    """A batch in flight: its float32 input, and the pending result with its sum."""

    images: Tensor
    result: PendingResult
    result_sum: PendingResult


class TileStep:
    """Runs equal tiles through a network, for images of one kind.

    A call is `begin` followed by `finish`. With an asynchronous ``transfer``, Python continues
    while the device works, so that more tiles are started before the first ones are finished.
    """

    def __init__(
        self, network: NetworkSpec, info: ImageInfo, transfer: TileTransfer | None = None
    ) -> None:
        self.network = network
        self.info = info
        self._transfer = transfer or SyncTileTransfer(network.device)
        self.channel_plan = ChannelPlan(info.channels, network.in_channels, network.out_channels)
        self.full_scale = _FULL_SCALE[info.sample_type]
        self.fp32_reruns = 0

    def __call__(self, tiles: Sequence[np.ndarray]) -> Tensor:
        """Run (H, W, C) sample tiles; return float32 (B, C, H·s, W·s) in 0..1 on the host."""
        return self.finish(self.begin(tiles))

    @torch.inference_mode()
    def begin(self, tiles: Sequence[np.ndarray]) -> PendingBatch:
        """Start the network on the tiles, which are not read again."""
        images = self._to_batch(tiles)
        result = self.network.forward(self._network_input(images))
        # NaN and infinity survive a sum, so finiteness is checked without a copy of the whole
        # result.
        return PendingBatch(
            images, self._transfer.to_host(result), self._transfer.to_host(result.sum())
        )

    @torch.inference_mode()
    def finish(self, pending: PendingBatch) -> Tensor:
        """Wait for the result of a batch. Raises `NotFiniteError`."""
        network = self.network
        total, result = pending.result_sum.wait(), pending.result.wait()
        if not total.isfinite() and network.make_fp32_forward is not None:
            self.fp32_reruns += 1
            result = network.make_fp32_forward()(self._network_input(pending.images)).cpu()
            total = result.sum()
        if not total.isfinite():
            raise NotFiniteError
        return self.channel_plan.from_network(result, pending.images)

    def _network_input(self, tiles: Tensor) -> Tensor:
        """Return the network's input, on its device and in its memory format."""
        images = self._transfer.to_device(self.channel_plan.to_network(tiles))
        return images.contiguous(memory_format=self.network.memory_format)

    def to_network(self, tiles: Sequence[np.ndarray]) -> Tensor:
        """Convert sample tiles to network inputs, float32 (B·images, C, H, W)."""
        return self.channel_plan.to_network(self._to_batch(tiles))

    def from_network(self, result: Tensor, tile: np.ndarray | None) -> Tensor:
        """Convert the network's result for one tile to float32 (C, H·s, W·s) in 0..1.

        Of the tile's samples only alpha is read. ``result`` may be modified in place.
        """
        if tile is None:
            return self.channel_plan.from_network(result, result[:1])[0]
        return self.channel_plan.from_network(result, self._to_batch([tile]))[0]

    def _to_batch(self, tiles: Sequence[np.ndarray]) -> Tensor:
        return torch.stack([self._to_tensor(tile) for tile in tiles])

    def _to_tensor(self, tile: np.ndarray) -> Tensor:
        # uint16 has few kernels in PyTorch; numpy converts it directly.
        floats = torch.from_numpy(np.ascontiguousarray(tile, dtype=np.float32))
        if self.full_scale == 1:
            # A float image may hold any value; networks expect 0..1.
            floats = torch.nan_to_num(floats).clamp_(0, 1)
        else:
            floats.mul_(1 / self.full_scale)
        return floats.permute(2, 0, 1)

    def to_samples(self, image: Tensor) -> np.ndarray:
        """Convert (C, H, W) in 0..1 to rounded (H, W, C) samples of the image's type."""
        rows = image.permute(1, 2, 0)
        if self.full_scale == 1:
            return rows.numpy()
        levels = rows.mul(self.full_scale).round_()
        if self.full_scale == 255:
            return levels.to(torch.uint8).numpy()
        return levels.to(torch.int32).numpy().astype(np.uint16)
