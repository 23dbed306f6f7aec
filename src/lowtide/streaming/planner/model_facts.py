"""Inputs of the planner: facts about model and image, and the user's overrides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lowtide.memory.costs import ModelCosts
from lowtide.memory.plan import ImageGeometry
from lowtide.memory.prediction.calibration import RunBounds

StrategyName = Literal["auto", "whole", "streamed", "tiled"]


@dataclass(frozen=True)
class ModelGeometry:
    """Geometry of a model: scale, channels, size rule, and whether it may be tiled.

    ``align`` is the grid of tiles: that of the size rule, or the multiple to which the model pads
    its input. ``tileable`` is False for models that split the image themselves or need all of it.
    """

    scale: int
    in_channels: int
    out_channels: int
    align: int = 1
    minimum: int = 0
    square: bool = False
    tileable: bool = True

    def of_image(self, image_task: ImageTask) -> ImageGeometry:
        """Return the sizes of an image and of what it is padded to."""
        return ImageGeometry(
            **{name: getattr(self, name) for name in ("scale", "align", "minimum", "square")},
            width=image_task.shape[1],
            height=image_task.shape[0],
            padded_width=image_task.padded_size[1],
            padded_height=image_task.padded_size[0],
            network_inputs=image_task.inputs,
        )


@dataclass(frozen=True)
class ImageTask:
    """Facts about a source (H, W, C) and its files that pricing needs.

    Attributes:
        shape: Shape of the source.
        padded_size: (height, width) after padding to the model's size rule.
        codec_bytes: (usual, largest) bytes of host memory for decoding, and for encoding, the file.
        finishing_bytes: The same for encoding the whole image once its last row has come, where
            ``codec_bytes`` are for the time until then. Nothing is read and no network runs then.
        codecs_stay: Whether ``codec_bytes`` are held between panels too, as for frames of a video.
        scratch_bytes: Disk bytes of the file formats.
        row_buffer_bytes: Bytes that the rows held for one row of tiles should stay within, where
            lower tiles allow it.
        ample_bytes: Bytes up to which saving memory has no benefit.
        tiled_bounds: Error of past predictions for tiled runs.
        streamed_bounds: Error of past predictions for streamed runs.
        extra_resident_bytes: Host bytes of the model in addition to its weights.
        item_bytes: Bytes of one value of the source, and of the sink.
        inputs: Network inputs made of one tile, as `lowtide.core.signal.ValueAdapter` makes them.
    """

    shape: tuple[int, int, int]
    padded_size: tuple[int, int]
    codec_bytes: tuple[tuple[int, int], ...] = ()
    finishing_bytes: tuple[int, int] = (0, 0)
    codecs_stay: bool = False
    scratch_bytes: int = 0
    row_buffer_bytes: int | None = None
    ample_bytes: int | None = None
    tiled_bounds: RunBounds = field(default_factory=RunBounds)
    streamed_bounds: RunBounds = field(default_factory=RunBounds)
    extra_resident_bytes: int = 0
    item_bytes: int = 1
    inputs: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the source."""
        return self.shape[1] * self.shape[2] * self.item_bytes


@dataclass(frozen=True)
class PlanOverrides:
    """Plan settings fixed by the user; None leaves a setting to the planner."""

    strategy: StrategyName = "auto"
    tile: int | None = None
    overlap: int | None = None
    batch: int | None = None
    hann_blend: bool | None = None

    @property
    def only_bands(self) -> bool:
        """Whether the network is to run in bands, and nothing else is considered."""
        return self.strategy == "streamed"

    @property
    def requires_tiles(self) -> bool:
        """Whether any override requires tiles; disabling blending does not."""
        numbers = self.tile, self.overlap, self.batch
        return bool(self.hann_blend) or any(number is not None for number in numbers)


def plan_fields(
    costs: ModelCosts, geometry: ModelGeometry, image_task: ImageTask
) -> dict[str, Any]:
    """Return the fields of a plan that are the same for every strategy."""
    image, names = geometry.of_image(image_task), ("device", "precision", "channels_last")
    return {"image": image, **{name: getattr(costs, name) for name in names}}
