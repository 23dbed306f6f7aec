"""How halo windows are cut into tiles for the kernels, and what shared memory that may take.

Plain numbers: nothing here needs Triton or a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from lowtide.attention.spatial.window_grid import Windows

# Shared memory that one program may have, in bytes, by CUDA compute capability (CUDA C++
# Programming Guide, table "Technical Specifications per Compute Capability").
SHARED_MEMORY = {
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (11, 0): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}


@dataclass(frozen=True)
class KernelTile:
    """Queries and keys in one product of matrices; both are powers of two, 16 at least.

    The rest is Triton's: groups of 32 threads, loads in flight, and whether tiles are loaded by
    tensor descriptors, which Hopper's copy engine takes (compute capability 9.0).
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    tiled: bool = False

    @property
    def side(self) -> int:
        """Of a square with so many keys."""
        return math.isqrt(self.keys)

    @property
    def rectangle(self) -> tuple[int, int]:
        """Rows and columns of so many queries: a square, or two of them side by side."""
        rows = 1 << (self.queries.bit_length() - 1) // 2
        return rows, self.queries // rows


@dataclass(frozen=True)
class KernelTiles:
    """A tile for each kernel. That of ``key`` has a square of keys and a rectangle of queries; the
    others go through a window row by row. That of ``bias`` is never ``tiled``."""

    forward: KernelTile
    query: KernelTile
    key: KernelTile
    bias: KernelTile


def tiles_for(
    windows: Windows, head_dim: int, dtype: torch.dtype, limit: int = min(SHARED_MEMORY.values())
) -> KernelTiles:
    """Tiles whose kernels fit ``limit`` bytes of shared memory.

    Those of 16-bit numbers for cards with as much as Hopper has are the fastest of some sixty that
    were measured on one, with heads of 32 and 64 channels.
    """
    row = padded_dim(head_dim) * dtype.itemsize
    if dtype.itemsize == 2 and limit >= SHARED_MEMORY[9, 0]:
        narrow = head_dim <= 64
        plain = KernelTile(64, 64, stages=3 if narrow else 2)
        tiled = replace(plain, tiled=True)
        return KernelTiles(tiled, tiled, tiled if narrow else replace(tiled, queries=32), plain)

    def most(sizes: tuple[int, ...]) -> int:
        # Eight tiles of rows are held at once, and two of scores in fp32; compiled for each kind
        # of card, this is never too little.
        fits = (size for size in sizes if 8 * size * (row + size) <= limit)
        return next(fits, min(sizes))

    keys = most((64, 32, 16))
    plain = KernelTile(keys, keys, stages=1 if head_dim > 64 else 2)
    # Those of the keys' own gradients are a square.
    return KernelTiles(plain, plain, replace(plain, keys=keys if keys != 32 else 16), plain)


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes that a program may have on a card; for one that is not known, the least of all."""
    return SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))


def padded_dim(head_dim: int) -> int:
    """Channels of a head as the kernel holds them: a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def descriptor_block(
    windows: Windows, tile: KernelTile, head_dim: int, *, square: bool = False
) -> list[int] | None:
    """What one load by a tensor's descriptor takes of (batch, rows, columns, heads, channels): some
    rows of a window's keys, or with ``square`` a rectangle of queries; None if it cannot."""
    cut = tile.rectangle if square else (tile.keys // windows.size, windows.size)
    power = windows.size & (windows.size - 1) == 0
    if not square and (tile.keys % windows.size or windows.size**2 % tile.keys or not power):
        return None
    if windows.boundary == "reflect":
        return None
    return [1, *cut, 1, padded_dim(head_dim)]


def tile_count(length: int, step: int) -> int:
    """How many steps it takes to cover a length."""
    return -(-length // step)


def unmasked_windows(
    windows: Windows, length: int, phase: int, tile: KernelTile
) -> tuple[int, int]:
    """The windows of an axis, from one to another, of which every key is in the image: if tiles of
    keys have no rest, they need no masks."""
    if windows.size**2 % tile.keys:
        return 0, 0
    count = windows.count(length, phase)
    if windows.boundary == "shift":
        return (0, count) if length >= windows.size else (0, 0)
    first = tile_count(phase + windows.margin, windows.step)
    last = (length - windows.size + phase + windows.margin) // windows.step + 1
    return (first, min(last, count)) if last > first else (0, 0)


def key_tiles(windows: Windows, length: int, phase: int, tile: KernelTile) -> int:
    """Tiles of keys along an axis; the first one begins where a window might, before the image."""
    return tile_count(length + (phase + windows.margin) % tile.side, tile.side)


@lru_cache(maxsize=256)
def unmasked_keys(windows: Windows, length: int, phase: int, tile: KernelTile) -> tuple[int, int]:
    """The tiles of keys of an axis, from one to another, that every window which sees them sees
    whole, and all of whose queries are in the image."""
    step, margin, side = windows.step, windows.margin, tile.side
    fits = not any((step % side, 2 * margin % side, *(step % cut for cut in tile.rectangle)))
    if windows.boundary == "shift" or not fits:
        return 0, 0
    begin, count = (phase + margin) % side, windows.count(length, phase)
    good = []
    for number in range(key_tiles(windows, length, phase, tile)):
        low = number * side - begin
        first = max(max(low, 0) + phase - margin, 0) // step
        last = min((min(low + side, length) - 1 + phase + margin) // step, count - 1)
        queries = first * step - phase, (last + 1) * step - phase
        if low >= 0 and low + side <= length and queries[0] >= 0 and queries[1] <= length:
            good.append(number)
    return (good[0], good[-1] + 1) if good else (0, 0)
