"""Halo windows by Triton: what the kernels take, their launch, and gradients."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.backends import Missing
from lowtide.attention.call import Device, LocalDevice
from lowtide.attention.halo.tiles import Tiles, padded_dim, shared_memory, tiles_for
from lowtide.attention.spatial.windows import Windows
from lowtide.core.errors import UsageError

_BOUNDARIES = {"mask": 0, "shift": 1, "zero": 2, "reflect": 3}
_WIDEST_HEAD = 128
# Programs of a grid along its second and third axis.
_MOST = 65_535


def missing(device: Device) -> Missing | None:
    """Why the kernels cannot run on ``device`` at all; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return Missing(
            "Triton is not installed", "pip install triton (on Windows: triton-windows)"
        )  # fmt: skip
    if _interpreted():
        return None
    if device.kind != "cuda":
        return Missing("needs a CUDA device, or TRITON_INTERPRET=1, which is very slow")
    if device.capability < (7, 5):
        return Missing(f"needs compute capability 7.5, not {device.capability}")
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(
    shape: tuple[int, ...], dtype: torch.dtype, windows: Windows, *, learned_bias: bool = False,
    needs_grad: bool = False,
) -> str | None:  # fmt: skip
    """The first thing that the kernels cannot compute; None if they can do all.

    ``shape`` is (batch, height, width, heads, dim) of query, key and value.
    """
    batch, height, _, heads, dim = shape
    rules = (
        ("the windows are blended", windows.form != "halo"),
        (f"the type is {str(dtype).removeprefix('torch.')}", dtype == torch.float64),
        # The interpreter's products take the bits of bf16 for whole numbers.
        ("Triton's interpreter has no bf16", dtype == torch.bfloat16 and _interpreted()),
        (f"heads have {dim} channels, more than {_WIDEST_HEAD}", dim > _WIDEST_HEAD),
        (f"{batch * heads} batches × heads exceed {_MOST}", batch * heads > _MOST),
        (f"{height} rows exceed a grid", windows.count(height, 0) > _MOST),
        (
            "keys seen by reflection have no gradient here",
            needs_grad and windows.boundary == "reflect",
        ),
        (
            "a bias that is learned needs windows that are not moved",
            needs_grad and learned_bias and windows.boundary == "shift",
        ),
    )
    return next((reason for reason, refused in rules if refused), None)


def halo_attention(
    query: Tensor, key: Tensor, value: Tensor, windows: Windows, table: Tensor | None = None,
    *, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each block of pixels to the window round it.

    Args:
        query, key, value: (batch, height, width, heads, dim), fp32, bf16 or fp16. Their last
            dimension must be contiguous; nothing else is copied.
        windows: halo windows.
        table: (heads, 2·farthest + 1, 2·farthest + 1) numbers added to scores by distance down
            and right, with ``windows.farthest``.
        tiles: by default `tiles_for`.

    Returns:
        (batch, height, width, heads, dim) in the query's dtype. Exact up to rounding: sums are in
        fp32, products of fp32 are not rounded to TF32 unless PyTorch's are. The backward pass has
        no atomic sums and gives the same bits every time.

    Raises `UsageError` for what `refusal` names.
    """
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    learned = table is not None and torch.is_grad_enabled() and table.requires_grad
    shape = tuple(query.shape)
    reason = refusal(
        shape, query.dtype, windows, learned_bias=learned, needs_grad=learns or learned
    )  # fmt: skip
    if reason is not None:
        raise UsageError(f"the halo kernels cannot do this: {reason}")
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    if tiles is None:
        limit = shared_memory(LocalDevice.of(query.device).capability)
        tiles = tiles_for(windows, query.shape[-1], query.dtype, limit)
    return _Halo.apply(query, key, value, table, windows, tiles)


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None,
        windows: Windows, tiles: Tiles,
    ) -> Tensor:  # fmt: skip
        kernels = _kernels()
        batch, height, width, heads, _ = query.shape
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty(batch, heads, height, width, dtype=torch.float32)
        bias = None if table is None else table.detach().contiguous()
        launch = _Launch(query, windows, tiles, bias)
        kernels.forward[launch.windows_grid](
            query, key, value, result, sums, launch.table, *launch.sizes,
            *_strides(query, key, value, result), **launch.constants, **launch.bias_constants,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, result, sums, bias)
        ctx.settings = windows, tiles
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        kernels = _kernels()
        query, key, value, result, sums, bias = ctx.saved_tensors
        windows, tiles = ctx.settings
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        launch = _Launch(query, windows, tiles, bias)
        changes = torch.empty_like(sums)
        of_query, of_key, of_value = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (query, key, value)
        )
        strides = _strides(query, key, value, result, gradient)
        kernels.backward_query[launch.windows_grid](
            query, key, value, result, sums, launch.table, gradient, changes, of_query,
            *launch.sizes, *strides, **launch.constants, **launch.bias_constants,
        )  # fmt: skip
        kernels.backward_key[launch.image_grid](
            query, key, value, sums, launch.table, gradient, changes, of_key, of_value,
            *launch.sizes, *launch.windows_count, *strides, **launch.constants,
            **launch.bias_constants,
        )  # fmt: skip
        of_table = None
        if ctx.needs_input_grad[3]:
            of_table = _table_gradient(launch, query, key, value, sums, gradient, changes)
        return of_query, of_key, of_value, of_table, None, None


class _Launch:
    """Grids, sizes and constants of the kernels for one call."""

    def __init__(
        self, query: Tensor, windows: Windows, tiles: Tiles, table: Tensor | None
    ) -> None:
        self.batch, height, width, self.heads, dim = query.shape
        self.windows, self.tiles = windows, tiles
        self.windows_count = tuple(
            windows.count(length, phase)
            for length, phase in zip((height, width), windows.phase, strict=True)
        )
        down, right = self.windows_count
        self.query_tiles = _cuts(windows.step, tiles.query[0]) * _cuts(
            windows.step, tiles.query[1]
        )
        self.key_tiles = _cuts(windows.size, tiles.key[0]) * _cuts(windows.size, tiles.key[1])
        self.windows_grid = right * self.query_tiles, down, self.batch * self.heads
        self.image_grid = (
            _cuts(width, tiles.key[1]), _cuts(height, tiles.key[0]), self.batch * self.heads,
        )  # fmt: skip
        self.sizes = height, width, self.heads, *windows.phase, dim**-0.5
        # A pointer that is not read, where there is no bias.
        self.table = query if table is None else table
        self.constants = constants(windows, tiles, dim, query.dtype)
        self.bias_constants = dict(HAS_BIAS=table is not None)


def constants(
    windows: Windows, tiles: Tiles, head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    """What the kernels are compiled for."""
    return dict(
        STEP=windows.step, MARGIN=windows.margin, SIZE=windows.size,
        BOUNDARY=_BOUNDARIES[windows.boundary], HEAD=head_dim, WIDE=padded_dim(head_dim),
        TILE_H=tiles.query[0], TILE_W=tiles.query[1], KEY_H=tiles.key[0], KEY_W=tiles.key[1],
        FARTHEST=windows.farthest, PRECISION=_precision(dtype),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _table_gradient(
    launch: _Launch, query: Tensor, key: Tensor, value: Tensor, sums: Tensor, gradient: Tensor,
    changes: Tensor,
) -> Tensor:  # fmt: skip
    """Scores' gradients, summed over all windows, then over pairs of equal distance."""
    kernels = _kernels()
    windows, tiles, table = launch.windows, launch.tiles, launch.table
    found = query.new_empty(
        launch.heads, launch.query_tiles, *tiles.query, launch.key_tiles, *tiles.key,
        dtype=torch.float32,
    )  # fmt: skip
    kernels.backward_bias[launch.key_tiles, launch.query_tiles, launch.heads](
        query, key, value, sums, table, gradient, changes, found, *launch.sizes, launch.batch,
        *launch.windows_count, *_strides(query, key, value, gradient), **launch.constants,
    )  # fmt: skip
    step, size = windows.step, windows.size
    across = _cuts(step, tiles.query[1]), _cuts(size, tiles.key[1])
    # (heads, rows, columns) of queries, then of keys, without what sticks out of the window.
    found = found.unflatten(4, (-1, across[1])).unflatten(1, (-1, across[0]))
    found = found.permute(0, 1, 3, 2, 4, 5, 7, 6, 8)
    found = found.flatten(7, 8).flatten(5, 6).flatten(3, 4).flatten(1, 2)
    found = found[:, :step, :step, :size, :size]
    return _by_distance(found, windows).to(table.dtype)


def _by_distance(found: Tensor, windows: Windows) -> Tensor:
    """Sums of (heads, queries down, right, keys down, right) over pairs of one distance."""
    side, first = 2 * windows.farthest + 1, windows.farthest - windows.margin
    heads, down, right, tall, wide = found.shape
    rows = found.new_zeros(heads, right, side, wide)
    for at in range(down):
        rows[:, :, first - at : first - at + tall] += found[:, at]
    total = found.new_zeros(heads, side, side)
    for at in range(right):
        total[:, :, first - at : first - at + wide] += rows[:, at]
    return total


def _kernels() -> Any:
    """The module of the kernels, which needs Triton; typed as what a checker cannot see through."""
    return importlib.import_module("lowtide.attention.halo.kernels")


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of batch, rows, columns and heads."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:4])


def _cuts(length: int, step: int) -> int:
    return -(-length // step)


def _precision(dtype: torch.dtype) -> str:
    """As PyTorch's own products of matrices."""
    loose = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if loose else "ieee"
