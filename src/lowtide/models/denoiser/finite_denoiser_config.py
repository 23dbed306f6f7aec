"""Configuration of FiniteDenoiser, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.core.errors import ModelError
from lowtide.models.denoiser.slim_unet_config import SchedulerName, SlimUNetConfig
from lowtide.models.descriptor import SizeRule
from lowtide.models.paragonsr2.conv_config import FileConfig

# Brightness and color, each in octaves of 1, 2 and 4 pixels.
LEVELS = 6


@dataclass(frozen=True)
class FiniteDenoiserConfig(FileConfig):
    """Widths and depths of a `FiniteDenoiser`, which is given the noise of pictures by octaves.

    The network works at a half of the picture's size and below: each of ``blocks`` is a level's
    number of blocks on either side, the last that of the lowest level. Levels have ``features``
    channels, doubled from each to the next. At full size it has ``fine`` channels. Levels in
    training reached ``max_sigma``, a standard deviation of values in 0..1.

    Raises ModelError for values that make no network.
    """

    features: int = 48
    blocks: tuple[int, ...] = (3, 3, 4)
    fine: int = 16
    max_sigma: float = 55 / 255

    # Facts that a `SlimUNetConfig` has as fields.
    noise_model: ClassVar[str] = "gaussian"
    noise_parameters: ClassVar[int] = LEVELS
    white_parameters: ClassVar[tuple[float, ...]] = (1.0,) * LEVELS
    scheduler: ClassVar[SchedulerName] = "ddim"
    linear: ClassVar[bool] = False
    camera: ClassVar[str] = ""
    noise_sha256: ClassVar[str] = ""
    cfa: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, list | tuple):
            raise ModelError(f"blocks must be a list of integers, not {self.blocks!r}")
        # JSON has no tuples. Bypasses the frozen dataclass.
        object.__setattr__(self, "blocks", tuple(self.blocks))
        values = (self.features, self.fine, *self.blocks)
        if not self.blocks or not all(type(value) is int and value >= 1 for value in values):
            raise ModelError(f"a FiniteDenoiser needs integers of at least 1, not {self.to_dict()}")
        if not isinstance(self.max_sigma, int | float) or not 0 < self.max_sigma <= 1:
            raise ModelError(f"max_sigma must be above 0 and at most 1, not {self.max_sigma!r}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, from the top down."""
        return tuple(self.features << level for level in range(len(self.blocks)))

    @property
    def scale(self) -> int:
        """Output pixels per input pixel, along each axis."""
        return 1

    @property
    def size(self) -> SizeRule:
        """Sizes that all levels divide."""
        return SizeRule(multiple_of=2 ** len(self.blocks))

    @property
    def noise(self) -> str:
        """What noise it removes, and up to which level."""
        most = f"{self.max_sigma * 255:.3g}"
        return f"white or shared by neighbors, up to a sigma of {most} of 255"

    @property
    def tags(self) -> tuple[str, ...]:
        """Size tags in the usual notation."""
        return f"{self.features}nf", "-".join(map(str, self.blocks)), "finite reach"

    @property
    def buffer_elements(self) -> int:
        """Number of values that say at which noise level it runs."""
        return LEVELS + 1


DenoiserConfig = SlimUNetConfig | FiniteDenoiserConfig
