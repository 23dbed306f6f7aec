"""Tile sizes of the halo kernels, their launch grids, arguments and compile-time constants.

Nothing here needs Triton or a GPU, but for tensor descriptors.

In half precision on an H200 they take 0.68 ms where unfolded windows take 2.24 and FlexAttention
11.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.spatial.window_grid import Boundary, WindowGeometry

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
    windows: WindowGeometry,
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


def shared_memory_bytes(capability: tuple[int, int]) -> int:
    """Return the shared memory per thread block of a GPU, in bytes.

    For an unknown compute capability, the least of all.
    """
    return SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))


def padded_dim(head_dim: int) -> int:
    """Return the head dim padded to a power of two, at least 16, as in the kernels."""
    return max(16, 1 << (head_dim - 1).bit_length())


def descriptor_block(
    windows: WindowGeometry, tile: KernelTile, head_dim: int, *, square: bool = False
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


def ceil_div(length: int, step: int) -> int:
    """Return ⌈length / step⌉."""
    return -(-length // step)


def unmasked_windows(
    windows: WindowGeometry, length: int, phase: int, tile: KernelTile
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
    first = ceil_div(phase + windows.halo, windows.stride)
    last = (length - windows.size + phase + windows.halo) // windows.stride + 1
    return (first, min(last, count)) if last > first else (0, 0)


def key_tiles(windows: WindowGeometry, length: int, phase: int, tile: KernelTile) -> int:
    """Return the number of key tiles along an axis.

    The first tile begins where a window might, before the image.
    """
    return ceil_div(length + (phase + windows.halo) % tile.side, tile.side)


@lru_cache(maxsize=256)
def unmasked_keys(
    windows: WindowGeometry, length: int, phase: int, tile: KernelTile
) -> tuple[int, int]:
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


# (grid, the kernel's argument ``grid``, compile-time constants and launch options).
KernelLaunch = tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]


@dataclass(frozen=True)
class KernelConstants:
    """Compile-time constants of a kernel.

    ``inside`` windows need no masks, ``tiled`` tensors come as descriptors.
    """

    stride: int
    halo: int
    size: int
    boundary: Boundary
    max_distance: int
    head_dim: int
    precision: str
    tile: KernelTile
    has_bias: bool
    inside: bool = False
    tiled: bool = False

    @property
    def padded_dim(self) -> int:
        """Head dim padded to a power of two."""
        return padded_dim(self.head_dim)


class HaloLaunch:
    """Launch grids, arguments and constants of the halo kernels for one call.

    ``query`` is (B, H, W, heads, head dim), ``table`` is (heads, distances down, distances right)
    or None for no bias.
    """

    def __init__(self, query: Tensor, windows: WindowGeometry, table: Tensor | None) -> None:
        self.batch, self.height, self.width, self.heads, self.dim = query.shape
        self.windows, self.dtype = windows, query.dtype
        self.axes = tuple(zip((self.height, self.width), windows.phase, strict=True))
        self.window_counts = tuple(windows.count(length, phase) for length, phase in self.axes)
        # The kernels' arguments ``image`` and ``scale``.
        self.sizes = (self.height, self.width, self.heads, *windows.phase), self.dim**-0.5
        # Without a bias, any valid pointer: the kernel does not read it.
        self.table = query if table is None else table
        self.has_bias = table is not None

    def query_launches(self, tile: KernelTile, tiled: bool) -> Iterator[KernelLaunch]:
        """Yield launches with one program per tile of a window's queries."""
        inner = [unmasked_windows(self.windows, length, phase, tile) for length, phase in self.axes]
        programs = ceil_div(self.windows.stride**2, tile.queries)
        for inside, count in _inner_and_border(self.window_counts, inner):
            grid = count * programs, self.batch * self.heads
            fixed = self.constants(tile, inside=inside, tiled=tiled)
            yield grid, (*self.window_counts, *inner[0], *inner[1]), fixed

    def key_launches(self, tile: KernelTile, tiled: bool) -> Iterator[KernelLaunch]:
        """Yield launches with one program per square of keys."""
        tiles = [key_tiles(self.windows, length, phase, tile) for length, phase in self.axes]
        inner = [unmasked_keys(self.windows, length, phase, tile) for length, phase in self.axes]
        for inside, count in _inner_and_border(tiles, inner):
            place = *self.window_counts, *tiles, *inner[0], *inner[1]
            fixed = self.constants(tile, inside=inside, tiled=tiled)
            yield (count, self.batch * self.heads), place, fixed

    def constants(self, tile: KernelTile, **switches: bool) -> dict[str, Any]:
        """Return a kernel's compile-time constants and launch options."""
        switches |= dict(has_bias=self.has_bias)
        return kernel_constants(self.windows, tile, self.dim, self.dtype, **switches)

    def descriptors(
        self, tile: KernelTile, *tensors: Tensor, square: bool = False
    ) -> list[Any] | None:
        """Return tensor descriptors for loads of whole tiles, None where not possible.

        Tensors are (B, H, W, heads, head dim).
        """
        cut = descriptor_block(self.windows, tile, self.dim, square=square)
        if not tile.tiled or cut is None or not all(map(_aligned, tensors)):
            return None
        from triton.tools.tensor_descriptor import TensorDescriptor

        return [
            TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), cut)
            for tensor in tensors
        ]


def _aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is aligned for tensor descriptors.

    Its pointer and all strides but the last must be multiples of 16 bytes.
    """
    steps = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % 16 == 0 and not any(step % 16 for step in steps)


def _inner_and_border(
    whole: Sequence[int], inner: Sequence[tuple[int, int]]
) -> Iterator[tuple[bool, int]]:
    """Yield (whether inside, count) for the places inside a rectangle and outside it.

    Empty parts are left out.
    """
    (top, bottom), (left, right) = inner
    inside = (bottom - top) * (right - left)
    for which, count in ((True, inside), (False, whole[0] * whole[1] - inside)):
        if count:
            yield which, count


def kernel_constants(
    windows: WindowGeometry, tile: KernelTile, head_dim: int, dtype: torch.dtype, **switches: bool
) -> dict[str, Any]:
    """Return a kernel's compile-time constants and launch options."""
    fixed = KernelConstants(
        windows.stride,
        windows.halo,
        windows.size,
        windows.boundary,
        windows.max_distance,
        head_dim,
        _precision(dtype),
        tile,
        **switches,
    )
    return dict(fixed=fixed, num_warps=tile.warps, num_stages=tile.stages)


def strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the strides of each tensor along B, H, W and heads."""
    return tuple(tensor.stride()[:4] for tensor in tensors)


def _precision(dtype: torch.dtype) -> str:
    """Return the input precision of `tl.dot`, as PyTorch's matrix products have it."""
    loose = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if loose else "ieee"
