"""State carried from one run of a program to the next, freed and made band by band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment, page_readers
from lowtide.streaming.pages.page import MemoryPage

# Pieces of a state tensor: what is read is freed piece by piece.
_PIECES = 16
# Bands whose old rows are there while a band makes new ones: its own and the one before.
_OVERLAPPING_BANDS = 2


@dataclass(frozen=True)
class CarriedState:
    """Pages of the tensors that a run hands to the next, such as caches (1, C, 2, H, W)."""

    pages: list[MemoryPage]
    dim: int = 0

    @classmethod
    def empty(cls, count: int, dim: int, device: torch.device) -> CarriedState:
        """Return ``count`` pages without rows, which will be along ``dim``."""
        return cls([MemoryPage(dim, device) for _ in range(count)], dim)

    def write(self, index: int, first: int, rows: Tensor) -> None:
        """Keep a copy of rows from row ``first`` on, such as (1, C, 2, rows, W), in pieces."""
        for part in rows.split(-(-rows.shape[self.dim] // _PIECES), self.dim):
            self.pages[index].write(first, part.clone())
            first += part.shape[self.dim]


def held_bytes(
    program: StreamProgram,
    segments: Sequence[Segment],
    bands: Sequence[int],
    *,
    state_bytes: int,
    result_bytes: int,
) -> int:
    """Return the most bytes that chunk, result and state take while a program runs.

    Old rows of a state are freed while new ones are made, so that both are there only for the
    bands at work, and where several segments read it. The first input is a copy of the chunk.

    Args:
        program: Program that takes the state and makes the next.
        segments: Its segments.
        bands: Number of bands of each.
        state_bytes: Bytes of the state.
        result_bytes: Bytes of the result of all runs, held from the start.
    """
    readers, overlap = page_readers(segments), [0.0] * len(segments)
    twice = 0
    for index in program.graph.inputs[1:]:
        size, at = program.bytes_of(index), readers.get(index, [])
        if len(at) == 1:
            overlap[at[0]] += size * min(1.0, _OVERLAPPING_BANDS / bands[at[0]] + 1 / _PIECES)
        else:
            twice += size
    chunk_bytes = program.bytes_of(program.graph.inputs[0])
    return chunk_bytes + result_bytes + state_bytes + twice + int(max(overlap, default=0))
