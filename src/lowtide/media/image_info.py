"""Size, channels and sample type of an image, and its rows as jobs read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

from lowtide.core.signal import RowSource

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

SampleType = Literal["uint8", "uint16", "float32"]
_SAMPLE_BYTES: dict[str, int] = {"uint8": 1, "uint16": 2, "float32": 4}
# Samples of white and of full opacity.
FULL_SCALE: dict[str, int] = {"uint8": 255, "uint16": 65_535, "float32": 1}


@dataclass(frozen=True)
class ValueRange:
    """Values of an image whose samples do not span 0 to what their type makes white.

    Attributes:
        low, white: What is taken as 0 and as 1.
        least, most: The least and the largest finite sample.
        mean: Mean of the finite samples.
        not_finite: Number of samples that are NaN or infinite.
    """

    low: float
    white: float
    least: float
    most: float
    mean: float = 0.0
    not_finite: int = 0


@dataclass(frozen=True)
class ImageInfo:
    """Size, number of channels and sample type of an image.

    ``channels`` counts color channels plus the alpha channel, which is always last: 1 gray, 2 gray
    + alpha, 3 RGB, 4 RGB + alpha. Integer samples span the full range of their type, float samples
    0..1, unless ``value_range`` says otherwise; alpha of floats is always in 0..1.
    """

    width: int
    height: int
    channels: int
    sample_type: SampleType = "uint8"
    value_range: ValueRange | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of its array."""
        return self.height, self.width, self.channels

    @property
    def alpha(self) -> bool:
        """Whether the last channel is alpha (opacity)."""
        return self.channels in (2, 4)

    @property
    def color_channels(self) -> int:
        """Channels without alpha: 1 or 3."""
        return self.channels - self.alpha

    @property
    def full_scale(self) -> int:
        """Sample of white and of full opacity; of floats that of opacity."""
        if self.value_range is not None and self.sample_type != "float32":
            return int(self.value_range.white)
        return FULL_SCALE[self.sample_type]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return _SAMPLE_BYTES[self.sample_type]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return self.width * self.channels * self.sample_bytes

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height


class ImageRowReader(RowSource, Protocol):
    """Protocol of an open image, (H, W, C), that is read by rows."""

    @property
    def info(self) -> ImageInfo:
        """Shape and sample type of what `read` returns."""
        ...

    def __enter__(self) -> Self:
        """Return itself."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        ...


class ImageRowWriter(Protocol):
    """Protocol of an image that is written by rows, under a temporary name until `commit`."""

    @property
    def info(self) -> ImageInfo:
        """Shape and sample type of the rows."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Messages about what the file cannot keep."""
        ...

    def write(self, first: int, values: np.ndarray) -> None:
        """Append rows (N, W, C) from row ``first`` on; raises `OutputError`."""
        ...

    def close_rows(self) -> None:
        """Signal that all rows were written."""
        ...

    def finish(self) -> None:
        """Complete the file; raises `OutputError`, and leaves nothing behind then."""
        ...

    def commit(self) -> Path:
        """Finish it, and give it its final name."""
        ...

    def abort(self) -> None:
        """Remove it; no effect after `commit`."""
        ...
