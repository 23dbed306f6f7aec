"""One step of the work: tiles of samples in, tiles of results out. Probes run the same step."""

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
# What most of a network's layers compute in; it is given fp32 and gives that.
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
    """A model as the runner sees it: a function on (B, C, H, W) tensors in 0..1, and facts.

    ``forward`` takes sizes that already satisfy the model's size rule, on ``device``, and gives
    what need not be clamped, both in fp32 whatever it computes in. ``exact_forward`` is the same
    model in fp32 where ``precision`` is another, used to redo a tile whose low-precision result is
    not finite. ``let_go`` is there for networks whose memory is not PyTorch's, so that only the
    process's resident memory tells of it: it gives back what they keep from call to call.
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
        """How its inputs lie in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class PendingBatch:
    """Tiles on their way: what was given in floats, and the result with its sum, still to come."""

    units: Tensor
    result: PendingResult
    total: PendingResult


class TileStep:
    """Runs equal tiles through a network, for images of one kind.

    A call is `begin` and then `finish`. ``crossing`` may let Python go on while the device is at
    work, so that more tiles are begun before the first ones are finished.
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
        """(h, w, bands) sample arrays to float32 (n, bands, h·s, w·s) in 0..1, on the host."""
        return self.finish(self.begin(tiles))

    @torch.inference_mode()
    def begin(self, tiles: Sequence[np.ndarray]) -> PendingBatch:
        """Give the tiles to the network; they are not read again."""
        units = self._units(tiles)
        result = self.network.forward(self._given(units))
        # NaN and infinity survive a sum, which is told without bringing the result here.
        return PendingBatch(units, self._crossing.back(result), self._crossing.back(result.sum()))

    @torch.inference_mode()
    def finish(self, begun: PendingBatch) -> Tensor:
        """The result of a call, when it is there. Raises `NotFiniteError`."""
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
        """What the network gets, on its device and in its order."""
        images = self._crossing.there(self.channels.to_network(units))
        return images.contiguous(memory_format=self.network.memory_format)

    def to_network(self, tiles: Sequence[np.ndarray]) -> Tensor:
        """Sample arrays to what the network gets, float32 (n·images, channels, h, w)."""
        return self.channels.to_network(self._units(tiles))

    def from_network(self, result: Tensor, tile: np.ndarray | None) -> Tensor:
        """The network's result for one tile to float32 (bands, h·s, w·s) in 0..1; of the tile's
        samples only the opacity counts. ``result`` may be changed."""
        if tile is None:
            return self.channels.from_network(result, result[:1])[0]
        return self.channels.from_network(result, self._units([tile]))[0]

    def _units(self, tiles: Sequence[np.ndarray]) -> Tensor:
        return torch.stack([self._to_unit(tile) for tile in tiles])

    def _to_unit(self, tile: np.ndarray) -> Tensor:
        # uint16 has few kernels in PyTorch; numpy converts it without a detour.
        floats = torch.from_numpy(np.ascontiguousarray(tile, dtype=np.float32))
        if self.peak == 1:
            # A float image may hold anything; what is outside 0..1 has no place in a network.
            floats = torch.nan_to_num(floats).clamp_(0, 1)
        else:
            floats.mul_(1 / self.peak)
        return floats.permute(2, 0, 1)

    def to_samples(self, unit: Tensor) -> np.ndarray:
        """Float (bands, h, w) in 0..1 to (h, w, bands) samples of the image's type, rounded."""
        rows = unit.permute(1, 2, 0)
        if self.peak == 1:
            return rows.numpy()
        levels = rows.mul(self.peak).round_()
        if self.peak == 255:
            return levels.to(torch.uint8).numpy()
        return levels.to(torch.int32).numpy().astype(np.uint16)
