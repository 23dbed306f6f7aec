"""What pricing is told: of the model, of the picture, and of the user's wishes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lowtide.core.signal import ImageInfo
from lowtide.memory.prediction.calibration import RunBounds
from lowtide.streaming.tiles.image_adapter import ChannelPlan

StrategyName = Literal["auto", "whole", "streamed", "tiled"]


@dataclass(frozen=True)
class ModelGeometry:
    """What pricing must know of the model: scale, channels, size rule, and if tiles make sense.

    ``align`` is the grid of tiles: that of the size rule, or of what the model pads to inside.
    ``tileable`` is False for models that cut the image up themselves or need all of it.
    """

    scale: int
    in_channels: int
    out_channels: int
    align: int = 1
    minimum: int = 0
    square: bool = False
    tileable: bool = True

    def images(self, info: ImageInfo) -> int:
        """How many the network gets of one tile: color and alpha count apart."""
        return ChannelPlan(info.bands, self.in_channels, self.out_channels).images


@dataclass(frozen=True)
class ImageTask:
    """What pricing must know of the image and its files.

    ``padded`` is (height, width) as the model's size rule wants it; ``codecs`` are (usual, most)
    bytes of host memory that reading the format takes, and writing it; ``scratch_bytes`` is disk.
    ``row_bytes`` is what the rows held for one row of tiles should stay below where lower tiles
    allow it, and up to ``easy_bytes`` memory need not be saved. ``tiled`` and ``streamed`` are how
    far runs of each kind were from their predictions. ``beside_bytes`` is what the host holds for
    the model beside its weights.
    """

    info: ImageInfo
    padded: tuple[int, int]
    codecs: tuple[tuple[int, int], ...] = ()
    scratch_bytes: int = 0
    row_bytes: int | None = None
    easy_bytes: int | None = None
    tiled: RunBounds = field(default_factory=RunBounds)
    streamed: RunBounds = field(default_factory=RunBounds)
    beside_bytes: int = 0


@dataclass(frozen=True)
class Overrides:
    """What the user fixed; None leaves it to the plan."""

    strategy: StrategyName = "auto"
    tile: int | None = None
    overlap: int | None = None
    batch: int | None = None
    hann_blend: bool | None = None

    @property
    def about_tiles(self) -> bool:
        """Whether anything was said by which there must be tiles; that they are not to be blended
        is nothing of the kind."""
        numbers = self.tile, self.overlap, self.batch
        return bool(self.hann_blend) or any(number is not None for number in numbers)
