"""How halo windows are cut into tiles for a kernel, and what shared memory that may take.

Plain numbers: nothing here needs Triton or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.attention.spatial.windows import Windows

# Shared memory that one program may have, in bytes, by CUDA compute capability (CUDA C++
# Programming Guide, table "Technical Specifications per Compute Capability").
SHARED_MEMORY = {
    (7, 5): 65_536, (8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376,
    (9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448, (11, 0): 232_448, (12, 0): 101_376,
    (12, 1): 101_376,
}  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """Queries and keys that a program takes at once, as pixels down and right.

    ``warps`` and ``stages`` are Triton's: groups of 32 threads, and loads in flight.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    warps: int = 4
    stages: int = 2

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.query[0] * self.query[1]

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return self.key[0] * self.key[1]


# Shapes of tiles by their pixels. A product of matrices takes 16 rows at least, and a side of 8
# divides the usual steps and windows.
_SHAPES = {128: (8, 16), 64: (8, 8), 32: (4, 8), 16: (4, 4)}


def tiles_for(
    windows: Windows, head_dim: int, dtype: torch.dtype, limit: int = min(SHARED_MEMORY.values())
) -> Tiles:
    """The largest tiles whose backward pass fits ``limit`` bytes of shared memory.

    Tiles of queries are wider than those of keys only where they divide the step.
    """
    row = padded_dim(head_dim) * dtype.itemsize

    def most(sizes: tuple[int, ...]) -> int:
        # Eight tiles of rows are held at once, and two of scores in fp32; compiled for each kind
        # of card, this is never too little.
        fits = (size for size in sizes if 8 * size * (row + size) <= limit)
        return next(fits, min(sizes))

    keys = most((64, 32, 16))
    queries = most((128, 64, 32, 16) if windows.step % 16 == 0 else (64, 32, 16))
    return Tiles(_SHAPES[queries], _SHAPES[keys], stages=1 if head_dim > 64 else 2)


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes that a program may have on a card; for one that is not known, the least of all."""
    return SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))


def padded_dim(head_dim: int) -> int:
    """Channels of a head as the kernel holds them: a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())
