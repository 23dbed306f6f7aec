"""Runs of a part of a video autoencoder whose results are finite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lowtide.core.errors import NotFiniteError
from lowtide.integrations.clip_autoencoder import PlannedPart

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.streaming.clip_plan import ReadChunk, WriteChunk

# Opens the input of a part at its first frame or latent.
OpenReading = Callable[[], AbstractContextManager["ReadChunk"]]


class _NotFiniteChunk(Exception):  # noqa: N818  (whether it is an error is decided elsewhere)
    """A part made values that are not finite."""


def run_finite(
    part: PlannedPart,
    open_reading: OpenReading,
    write: WriteChunk,
    *,
    wider: Callable[[], PlannedPart] | None,
) -> None:
    """Run a part from its first chunk to the last; all that is written is finite.

    Where fp16 overflows, the state is lost as well as the chunk. So all chunks run again in a wider
    precision, and those that were written are not written again.

    Args:
        part: What runs.
        open_reading: Opens its input, from the first frame or latent on.
        write: Called with the result of each chunk.
        wider: Returns the part in a wider precision; None where there is none.

    Raises:
        NotFiniteError: A chunk has NaN or infinity, in the wider precision too.
    """
    written = _run_while_finite(part, open_reading, write, 0)
    if written is not None and wider is not None:
        part = wider()
        written = _run_while_finite(part, open_reading, write, written)
    if written is not None:
        dtype = str(part.like.dtype).removeprefix("torch.")
        raise NotFiniteError(
            f"chunk {written + 1:,} that the model made has values that are not finite (NaN or"
            f" infinity), in {dtype}",
            hint="the weights or the latents may be damaged",
        )


def _run_while_finite(
    part: PlannedPart, open_reading: OpenReading, write: WriteChunk, skipped: int
) -> int | None:
    """Run a part; results of the first ``skipped`` chunks are not written.

    Returns the number of chunks before the first one that is not finite, None if all are finite.
    """
    number = 0

    def write_finite(made: Tensor) -> None:
        nonlocal number
        if not made.isfinite().all():
            raise _NotFiniteChunk
        if number >= skipped:
            write(made)
        number += 1

    try:
        with open_reading() as read:
            part.run(read, write_finite)
    except _NotFiniteChunk:
        return number
    return None
