"""Model descriptor and size rule: facts about a model before it runs, no PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

# What computes a network.
Runtime = Literal["torch", "ncnn"]
Tiling = Literal["supported", "discouraged", "internal"]


@dataclass(frozen=True)
class SizeRule:
    """Input sizes a model accepts, in pixels.

    Both sides must be at least ``minimum`` and a multiple of ``multiple_of``, and equal if
    ``square``. The semantics are those of spandrel's ``SizeRequirements``, which rounds a minimum
    up to the next multiple. Raises ValueError for values that make no sense.
    """

    minimum: int = 0
    multiple_of: int = 1
    square: bool = False

    def __post_init__(self) -> None:
        if self.minimum < 0 or self.multiple_of < 1:
            raise ValueError(
                f"minimum must be at least 0 and multiple_of at least 1, "
                f"not {self.minimum} and {self.multiple_of}"
            )
        # Bypasses the frozen dataclass.
        object.__setattr__(self, "minimum", self._round_up(self.minimum))

    def _round_up(self, size: int) -> int:
        return -(-size // self.multiple_of) * self.multiple_of

    def padding(self, height: int, width: int) -> tuple[int, int]:
        """Return the (rows, columns) to pad at the bottom and on the right, in pixels.

        Both are from 0 on. Raises ValueError for an empty image.
        """
        if height < 1 or width < 1:
            raise ValueError(f"an image of {width}x{height} pixels is empty")
        rows, columns = (self._round_up(max(self.minimum, side)) for side in (height, width))
        if self.square:
            rows = columns = max(rows, columns)
        return rows - height, columns - width


@dataclass(frozen=True, kw_only=True)
class ModelDescriptor:
    """Facts about one model: architecture, scale, channels, dtypes, tiling, license.

    ``purpose`` is "SR" for upscalers and "Restoration" for models that keep the size. ``tiling``
    says whether tiles of an image may be run alone: "discouraged" where the model looks at the
    image as a whole, "internal" where it tiles the image itself. ``parameters`` counts values and
    ``weight_bytes`` is what parameters and buffers occupy in the model's current dtype; both are 0
    before it is built. ``sha256`` is that of the file. ``license`` is None where the file does not
    say. ``noise`` is what noise a denoiser removes, and None for other models: a denoiser runs once
    it was told the level.
    """

    name: str
    architecture: str
    purpose: str
    scale: int
    in_channels: int
    out_channels: int
    size: SizeRule = SizeRule()
    supports_half: bool
    supports_bfloat16: bool
    tiling: Tiling
    tags: tuple[str, ...]
    parameters: int = 0
    weight_bytes: int = 0
    sha256: str
    license: str | None = None
    noise: str | None = None
    path: str | None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the floating-point dtypes the model may run in, widest first."""
        half = ("float16",) if self.supports_half else ()
        brain = ("bfloat16",) if self.supports_bfloat16 else ()
        return ("float64", "float32", *half, *brain)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, ready for JSON; keys are the fields' names."""
        return {**asdict(self), "tags": list(self.tags)}
