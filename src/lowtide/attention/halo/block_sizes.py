"""Tile sizes of the halo kernels, and the shared memory they may take.

Pure Python: nothing here needs Triton or a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from lowtide.attention.spatial.window_grid import Windows

# Most shared memory per thread block, in bytes, by CUDA compute capability (CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability").
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
    """Block sizes and Triton launch options of one kernel.

    ``queries`` and ``keys`` are the sizes of one matrix product, powers of two, at least 16.
    ``warps`` are groups of 32 threads, ``stages`` loads in flight. ``tiled`` loads tiles by tensor
    descriptors, which Hopper's copy engine supports (compute capability 9.0).
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    tiled: bool = False

    @property
    def side(self) -> int:
        """Side of the square of ``keys`` pixels."""
        return math.isqrt(self.keys)

    @property
    def rectangle(self) -> tuple[int, int]:
        """Rows and columns of ``queries`` pixels: a square, or two squares side by side."""
        rows = 1 << (self.queries.bit_length() - 1) // 2
        return rows, self.queries // rows


@dataclass(frozen=True)
class KernelTiles:
    """The tile of each halo kernel: forward, and gradients of query, key and bias.

    ``key`` has a square of keys and a rectangle of queries; the others iterate over a window row by
    row. ``bias`` is never ``tiled``.
    """

    forward: KernelTile
    query: KernelTile
    key: KernelTile
    bias: KernelTile


def choose_tiles(
    windows: Windows,
    head_dim: int,
    dtype: torch.dtype,
    max_bytes: int = min(SHARED_MEMORY.values()),
) -> KernelTiles:
    """Choose tiles whose kernels fit ``max_bytes`` bytes of shared memory.

    For 16-bit dtypes on GPUs with at least Hopper's shared memory they are the fastest of some
    sixty that were measured on a Hopper GPU, with head dims 32 and 64.
    """
    row = padded_dim(head_dim) * dtype.itemsize
    if dtype.itemsize == 2 and max_bytes >= SHARED_MEMORY[9, 0]:
        narrow = head_dim <= 64
        plain = KernelTile(64, 64, stages=3 if narrow else 2)
        tiled = replace(plain, tiled=True)
        return KernelTiles(tiled, tiled, tiled if narrow else replace(tiled, queries=32), plain)

    def most(sizes: tuple[int, ...]) -> int:
        # Estimate: eight tiles of rows and two of fp32 scores. Compiled for every kind of GPU, this
        # is never too low.
        fits = (size for size in sizes if 8 * size * (row + size) <= max_bytes)
        return next(fits, min(sizes))

    keys = most((64, 32, 16))
    plain = KernelTile(keys, keys, stages=1 if head_dim > 64 else 2)
    # The tile of the keys' gradients is a square.
    return KernelTiles(plain, plain, replace(plain, keys=keys if keys != 32 else 16), plain)


def shared_memory(capability: tuple[int, int]) -> int:
    """Return the shared memory per thread block of a GPU, in bytes.

    For an unknown compute capability, the least of all.
    """
    return SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))


def padded_dim(head_dim: int) -> int:
    """Return the head dim padded to a power of two, at least 16, as in the kernels."""
    return max(16, 1 << (head_dim - 1).bit_length())


def descriptor_block(
    windows: Windows, tile: KernelTile, head_dim: int, *, square: bool = False
) -> list[int] | None:
    """Return the block shape of one tensor-descriptor load, None if not possible.

    Over (B, H, W, heads, head dim): some rows of a window's keys, or with ``square`` a rectangle of
    queries.
    """
    cut = tile.rectangle if square else (tile.keys // windows.size, windows.size)
    power = windows.size & (windows.size - 1) == 0
    if not square and (tile.keys % windows.size or windows.size**2 % tile.keys or not power):
        return None
    if windows.boundary == "reflect":
        return None
    return [1, *cut, 1, padded_dim(head_dim)]


def tile_count(length: int, step: int) -> int:
    """Return ⌈length / step⌉."""
    return -(-length // step)


def unmasked_windows(
    windows: Windows, length: int, phase: int, tile: KernelTile
) -> tuple[int, int]:
    """Return the range [first, last) of windows with all keys in the image.

    Along one axis. If tiles of keys have no remainder, these windows need no masks. (0, 0) if there
    are none.
    """
    if windows.size**2 % tile.keys:
        return 0, 0
    count = windows.count(length, phase)
    if windows.boundary == "shift":
        return (0, count) if length >= windows.size else (0, 0)
    first = tile_count(phase + windows.halo, windows.stride)
    last = (length - windows.size + phase + windows.halo) // windows.stride + 1
    return (first, min(last, count)) if last > first else (0, 0)


def key_tiles(windows: Windows, length: int, phase: int, tile: KernelTile) -> int:
    """Return the number of key tiles along an axis.

    The first tile begins where a window might, before the image.
    """
    return tile_count(length + (phase + windows.halo) % tile.side, tile.side)


@lru_cache(maxsize=256)
def unmasked_keys(windows: Windows, length: int, phase: int, tile: KernelTile) -> tuple[int, int]:
    """Return the range [first, last) of key tiles along an axis that need no masks.

    Every window that sees such a tile sees all of it, and all of that window's queries are in the
    image. (0, 0) if there are none.
    """
    step, margin, side = windows.stride, windows.halo, tile.side
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
