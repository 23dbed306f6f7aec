"""Sources to read from, sinks to write to, and the conversion between them and a network.

Both are arrays whose leading axis is read and written in order, so that neither has to be in memory
as a whole: the rows of an image (H, W, C), the frames of a clip (T, H, W, C), the slices of a
volume (D, H, W, C), the steps of a series (L, C). Nothing here knows about file formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    import numpy as np


class ClosedOnExit:
    """Base of what a ``with`` block closes at its end."""

    def close(self) -> None:
        """Release what is open."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class RowSource(Protocol):
    """Protocol of an array that is read along its leading axis, in order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array, its leading axis first and its channels last."""
        ...

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the values that `read` returns."""
        ...

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the values from ``first`` to before ``last`` along the leading axis.

        ``first`` is never before the last value read; values in between are skipped.
        """
        ...

    def close(self) -> None:
        """Release what is open; may be called more than once."""
        ...


class RowSink(Protocol):
    """Protocol of an array that is written along its leading axis, in order."""

    def write(self, first: int, values: np.ndarray) -> None:
        """Write values from place ``first`` on, which is where the last ones ended.

        ``values`` are valid until the call returns.
        """
        ...


class ValueAdapter(Protocol):
    """Protocol of the conversion between a source's values, a network's and a sink's.

    Values have their channels last, (B, N, ..., C) with N along the leading axis; those of a
    network come after the batch, (B, C, N, ...). What is made of a place depends on no other,
    except for `context`.
    """

    @property
    def inputs(self) -> int:
        """Network inputs made of each value: an image's color and its opacity are two."""
        ...

    @property
    def context(self) -> int | None:
        """How far from a result `from_network` reads the source; None if not at all."""
        ...

    @property
    def channels(self) -> int:
        """Channels of the sink."""
        ...

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the sink: integers span 0..1, floats are taken as they are."""
        ...

    def to_network(self, values: np.ndarray) -> np.ndarray:
        """Convert (B, N, ..., C) of a source to new float32 (B·inputs, C, N, ...)."""
        ...

    def from_network(self, results: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Convert float32 (B·inputs, C, N·s, ...) to float32 (B, N·s, ..., C), s the scale.

        ``results`` may be modified in place. ``values`` are those of the source, (B, N, ..., C), or
        None where `context` is.
        """
        ...

    def to_sink(self, floats: np.ndarray) -> np.ndarray:
        """Convert float32 (..., C) to values of the sink, rounded where they are integers."""
        ...
