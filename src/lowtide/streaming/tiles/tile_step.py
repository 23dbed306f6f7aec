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
_PEAK = {"uint8": 255, "uint16": 65535, "float32": 1}


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
    exact_forward: Callable[[], Forward] | None = None
    let_go: Callable[[], None] | None = None

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory format of its inputs."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class PendingBatch:
    """A batch in flight: its float32 input, and the pending result with its sum."""

    units: Tensor
    result: PendingResult
    total: PendingResult


class TileStep:
    """Runs equal tiles through a network, for images of one kind.

    A call is `begin` followed by `finish`. With an asynchronous ``transfer``, Python continues
    while the device works, so that more tiles are started before the first ones are finished.
    """

    def __init__(
        self, network: NetworkSpec, info: ImageInfo, crossing: TileTransfer | None = None
    ) -> None:
        self.network = network
        self.info = info
        self._crossing = crossing or SyncTileTransfer(network.device)
        self.channels = ChannelPlan(info.bands, network.in_channels, network.out_channels)
        self.peak = _PEAK[info.sample]
        self.redone = 0

    def __call__(self, tiles: Sequence[np.ndarray]) -> Tensor:
        """Run (H, W, C) sample tiles; return float32 (B, C, H·s, W·s) in 0..1 on the host."""
        return self.finish(self.begin(tiles))

    @torch.inference_mode()
    def begin(self, tiles: Sequence[np.ndarray]) -> PendingBatch:
        """Start the network on the tiles, which are not read again."""
        units = self._units(tiles)
        result = self.network.forward(self._given(units))
        # NaN and infinity survive a sum, so finiteness is checked without a copy of the whole
        # result.
        return PendingBatch(units, self._crossing.back(result), self._crossing.back(result.sum()))

    @torch.inference_mode()
    def finish(self, begun: PendingBatch) -> Tensor:
        """Wait for the result of a batch. Raises `NotFiniteError`."""
        network = self.network
        total, result = begun.total.wait(), begun.result.wait()
        if not total.isfinite() and network.exact_forward is not None:
            self.redone += 1
            result = network.exact_forward()(self._given(begun.units)).cpu()
            total = result.sum()
        if not total.isfinite():
            raise NotFiniteError
        return self.channels.from_network(result, begun.units)

    def _given(self, units: Tensor) -> Tensor:
        """Return the network's input, on its device and in its memory format."""
        images = self._crossing.there(self.channels.to_network(units))
        return images.contiguous(memory_format=self.network.memory_format)

    def to_network(self, tiles: Sequence[np.ndarray]) -> Tensor:
        """Convert sample tiles to network inputs, float32 (B·images, C, H, W)."""
        return self.channels.to_network(self._units(tiles))

    def from_network(self, result: Tensor, tile: np.ndarray | None) -> Tensor:
        """Convert the network's result for one tile to float32 (C, H·s, W·s) in 0..1.

        Of the tile's samples only alpha is read. ``result`` may be modified in place.
        """
        if tile is None:
            return self.channels.from_network(result, result[:1])[0]
        return self.channels.from_network(result, self._units([tile]))[0]

    def _units(self, tiles: Sequence[np.ndarray]) -> Tensor:
        return torch.stack([self._to_unit(tile) for tile in tiles])

    def _to_unit(self, tile: np.ndarray) -> Tensor:
        # uint16 has few kernels in PyTorch; numpy converts it directly.
        floats = torch.from_numpy(np.ascontiguousarray(tile, dtype=np.float32))
        if self.peak == 1:
            # A float image may hold any value; networks expect 0..1.
            floats = torch.nan_to_num(floats).clamp_(0, 1)
        else:
            floats.mul_(1 / self.peak)
        return floats.permute(2, 0, 1)

    def to_samples(self, unit: Tensor) -> np.ndarray:
        """Convert (C, H, W) in 0..1 to rounded (H, W, C) samples of the image's type."""
        rows = unit.permute(1, 2, 0)
        if self.peak == 1:
            return rows.numpy()
        levels = rows.mul(self.peak).round_()
        if self.peak == 255:
            return levels.to(torch.uint8).numpy()
        return levels.to(torch.int32).numpy().astype(np.uint16)
