"""Images as rows: what a source gives, what a sink takes, and nothing about files.

A source is read once from the top to the bottom and a sink is written the same way, so that
neither image has to be in memory as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

SampleType = Literal["uint8", "uint16", "float32"]
_SAMPLE_BYTES: dict[str, int] = {"uint8": 1, "uint16": 2, "float32": 4}


@dataclass(frozen=True)
class ImageInfo:
    """Shape and sample type of an image.

    ``bands`` counts color bands plus the alpha band, which is always last:
    1 gray, 2 gray + alpha, 3 RGB, 4 RGB + alpha. Integer samples span their full type,
    float samples mean 0..1.
    """

    width: int
    height: int
    bands: int
    sample: SampleType = "uint8"

    @property
    def alpha(self) -> bool:
        """Whether the last band is an opacity."""
        return self.bands in (2, 4)

    @property
    def color_bands(self) -> int:
        """Bands without the alpha: 1 or 3."""
        return self.bands - self.alpha

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it lies in memory."""
        return self.width * self.bands * _SAMPLE_BYTES[self.sample]

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height


class RowSource(Protocol):
    """An image that is read from top to bottom."""

    @property
    def info(self) -> ImageInfo:
        """Shape and sample type of what `read` returns."""
        ...

    def read(self, count: int) -> np.ndarray:
        """The next ``count`` rows, shape (count, width, bands); fewer only at the end."""
        ...

    def close(self) -> None:
        """Release the file; may be called more than once."""
        ...


class RowWriter(Protocol):
    """Takes rows from top to bottom."""

    def write(self, rows: np.ndarray) -> None:
        """Append rows, shape (n, width, bands), in the sample type the sink was opened with."""
        ...


class RowSink(RowWriter, Protocol):
    """An image that is written from top to bottom."""

    def commit(self) -> Path:
        """Finish the file, give it its real name, and return that name."""
        ...

    def abort(self) -> None:
        """Remove everything that was written; harmless after `commit`."""
        ...
