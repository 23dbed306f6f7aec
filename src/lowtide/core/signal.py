"""Row-wise image interfaces: sources to read from and sinks to write to.

A source is read once from top to bottom and a sink is written the same way, so that neither image
has to be in memory as a whole. Nothing here knows about file formats.
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
    """Size, number of channels and sample type of an image.

    ``channels`` counts color channels plus the alpha channel, which is always last: 1 gray, 2 gray
    + alpha, 3 RGB, 4 RGB + alpha. Integer samples span the full range of their type, float samples
    0..1.
    """

    width: int
    height: int
    channels: int
    sample_type: SampleType = "uint8"

    @property
    def alpha(self) -> bool:
        """Whether the last channel is alpha (opacity)."""
        return self.channels in (2, 4)

    @property
    def color_channels(self) -> int:
        """Channels without alpha: 1 or 3."""
        return self.channels - self.alpha

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return self.width * self.channels * _SAMPLE_BYTES[self.sample_type]

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height


class RowSource(Protocol):
    """Protocol of an image that is read row by row, from top to bottom."""

    @property
    def info(self) -> ImageInfo:
        """Size and sample type of what `read` returns."""
        ...

    def read(self, count: int) -> np.ndarray:
        """Read the next ``count`` rows, (count, width, channels); fewer only at the end."""
        ...

    def close(self) -> None:
        """Release the file; may be called more than once."""
        ...


class RowWriter(Protocol):
    """Protocol of what takes image rows, from top to bottom."""

    def write(self, rows: np.ndarray) -> None:
        """Append rows (n, width, channels), in the sample type the sink was opened with."""
        ...


class RowSink(RowWriter, Protocol):
    """Protocol of an image that is written row by row, from top to bottom."""

    def commit(self) -> Path:
        """Finish the file, rename it to its final name, and return that name."""
        ...

    def abort(self) -> None:
        """Remove everything that was written; harmless after `commit`."""
        ...
