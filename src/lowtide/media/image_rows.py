"""What a job asks of an image that it reads, and of one that it writes, whatever the file is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

from lowtide.core.signal import Source

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from lowtide.media.image_info import ImageInfo


class ImageRows(Source, Protocol):
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


class ImageFile(Protocol):
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
