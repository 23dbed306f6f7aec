"""Autograd function of halo window attention by Triton kernels."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.backends import MissingRequirement
from lowtide.attention.halo.launch import (
    HaloLaunch,
    KernelTile,
    KernelTiles,
    ceil_div,
    choose_tiles,
    shared_memory_bytes,
    strides,
)
from lowtide.attention.spatial.window_grid import WindowGeometry
from lowtide.attention.spec import AttentionDevice, LocalDevice
from lowtide.core.errors import UsageError

_WIDEST_HEAD = 128
# Most programs along the second axis of a CUDA grid.
_MOST = 65_535


def missing_requirement(device: AttentionDevice) -> MissingRequirement | None:
    """Return the requirement missing on ``device``, None if the kernels can run."""
    if importlib.util.find_spec("triton") is None:
        return MissingRequirement(
            "Triton is not installed", "pip install triton (on Windows: triton-windows)"
        )
    if _interpreted():
        return None
    if device.kind != "cuda":
        return MissingRequirement("needs a CUDA device, or TRITON_INTERPRET=1, which is very slow")
    if device.capability < (7, 5):
        return MissingRequirement(f"needs compute capability 7.5, not {device.capability}")
    return None


def is_preferred(device: AttentionDevice, dtype: torch.dtype) -> bool:
    """Return whether the kernels are used by default on such a GPU.

    Only where they were compared with the formula and measured to be the fastest; see the benchmark
    ``attention_gpu``.
    """
    return device.kind == "cuda" and device.capability == (9, 0) and dtype.itemsize == 2


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def unsupported_reason(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    windows: WindowGeometry,
    *,
    learned_bias: bool = False,
    needs_grad: bool = False,
) -> str | None:
    """Return the first thing that the kernels do not support, None if all is.

    ``shape`` is (B, H, W, heads, head dim) of query, key and value.
    """
    batch, _, _, heads, dim = shape
    rules = (
        ("the windows are blended, not of the halo form", windows.form != "halo"),
        (f"the dtype is {str(dtype).removeprefix('torch.')}", dtype == torch.float64),
        # The interpreter's products read the bits of bf16 as integers.
        ("Triton's interpreter has no bf16", dtype == torch.bfloat16 and _interpreted()),
        (f"heads have {dim} channels, more than {_WIDEST_HEAD}", dim > _WIDEST_HEAD),
        (f"{batch * heads} batches × heads exceed {_MOST}", batch * heads > _MOST),
        (
            "reflected keys have no gradient in these kernels",
            needs_grad and windows.boundary == "reflect",
        ),
        (
            "a learned bias is not supported with boundary='shift'",
            needs_grad and learned_bias and windows.boundary == "shift",
        ),
    )
    return next((reason for reason, refused in rules if refused), None)


def halo_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    windows: WindowGeometry,
    table: Tensor | None = None,
    *,
    tiles: KernelTiles | None = None,
) -> Tensor:
    """Attention of each block of pixels to the halo window around it, by Triton.

    Args:
        query, key, value: (B, H, W, heads, head dim), fp32, bf16 or fp16. Copied only if their last
            dimension is not contiguous.
        windows: halo windows.
        table: (heads, 2·farthest + 1, 2·farthest + 1) biases added to scores by distance down and
            right, with ``windows.max_distance`` as farthest.
        tiles: by default `tiles_for`.

    Returns:
        (B, H, W, heads, head dim) in the query's dtype. Exact up to rounding: sums are in fp32, and
        fp32 products use TF32 only if PyTorch's do. The backward pass has no atomics and is
        deterministic.

    Raises:
        UsageError: for what `unsupported_reason` names.
    """
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    learned = table is not None and torch.is_grad_enabled() and table.requires_grad
    shape = tuple(query.shape)
    reason = unsupported_reason(
        shape, query.dtype, windows, learned_bias=learned, needs_grad=learns or learned
    )
    if reason is not None:
        raise UsageError(f"the halo kernels do not support this call: {reason}")
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    if tiles is None:
        limit = shared_memory_bytes(LocalDevice.of(query.device).capability)
        tiles = choose_tiles(windows, query.shape[-1], query.dtype, limit)
    # Dynamo, which breaks its graph at the kernels anyway, would not understand their tuples.
    run: Any = torch.compiler.disable(_Halo.apply) if torch.compiler.is_compiling() else _Halo.apply
    return run(query, key, value, table, windows, tiles)


class _Halo(torch.autograd.Function):
    """Autograd function that launches the forward and backward kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        windows: WindowGeometry,
        tiles: KernelTiles,
    ) -> Tensor:
        kernels = _kernels()
        batch, height, width, heads, _ = query.shape
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty(batch, heads, height, width, 2, dtype=torch.float32)
        bias = None if table is None else table.detach().contiguous()
        launch = HaloLaunch(query, windows, bias)
        steps = strides(query, key, value, result)
        tiled = launch.descriptors(tiles.forward, key, value)
        keys, values = tiled or (key, value)
        for grid, place, fixed in launch.query_launches(tiles.forward, tiled is not None):
            tensors = query, keys, values, result, sums, launch.table
            kernels.forward[grid](*tensors, *launch.sizes, place, steps, **fixed)
        ctx.save_for_backward(query, key, value, result, sums, bias)
        ctx.settings = windows, tiles
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        kernels = _kernels()
        query, key, value, result, sums, bias = ctx.saved_tensors
        windows, tiles = ctx.settings
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        launch = HaloLaunch(query, windows, bias)
        grad_query, grad_key, grad_value = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (query, key, value)
        )
        steps = strides(query, key, value, result, gradient)
        tiled = launch.descriptors(tiles.query, key, value)
        keys, values = tiled or (key, value)
        for grid, place, fixed in launch.query_launches(tiles.query, tiled is not None):
            tensors = query, keys, values, result, sums, launch.table, gradient, grad_query
            kernels.backward_query[grid](*tensors, *launch.sizes, place, steps, **fixed)
        tiled = launch.descriptors(tiles.key, query, gradient, square=True)
        queries, given = tiled or (query, gradient)
        for grid, place, fixed in launch.key_launches(tiles.key, tiled is not None):
            tensors = queries, key, value, sums, launch.table, given, grad_key, grad_value
            kernels.backward_key[grid](*tensors, *launch.sizes, place, steps, **fixed)
        grad_table = None
        if ctx.needs_input_grad[3]:
            grad_table = _table_gradient(launch, tiles.bias, query, key, value, sums, gradient)
        return grad_query, grad_key, grad_value, grad_table, None, None


def _table_gradient(
    launch: HaloLaunch,
    tile: KernelTile,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sums: Tensor,
    gradient: Tensor,
) -> Tensor:
    """Sum the scores' gradients over all windows, then over pairs of equal distance."""
    step, size, table = launch.windows.stride, launch.windows.size, launch.table
    queries, keys = ceil_div(step**2, tile.queries), ceil_div(size**2, tile.keys)
    shape = launch.heads, queries * tile.queries, keys * tile.keys
    found = query.new_empty(shape, dtype=torch.float32)
    place, steps = (launch.batch, *launch.window_counts), strides(query, key, value, gradient)
    tensors = query, key, value, sums, table, gradient, found
    grid = keys, queries, launch.heads
    _kernels().backward_bias[grid](*tensors, *launch.sizes, place, steps, **launch.constants(tile))
    found = found[:, : step**2, : size**2].unflatten(2, (size, size)).unflatten(1, (step, step))
    return _by_distance(found, launch.windows).to(table.dtype)


def _by_distance(found: Tensor, windows: WindowGeometry) -> Tensor:
    """Sum over all pairs of query and key with the same distance.

    ``found`` is (heads, queries down, queries right, keys down, keys right); the result is (heads,
    2·farthest + 1, 2·farthest + 1).
    """
    side, first = 2 * windows.max_distance + 1, windows.max_distance - windows.halo
    heads, down, right, tall, wide = found.shape
    rows = found.new_zeros(heads, right, side, wide)
    for at in range(down):
        rows[:, :, first - at : first - at + tall] += found[:, at]
    total = found.new_zeros(heads, side, side)
    for at in range(right):
        total[:, :, first - at : first - at + wide] += rows[:, at]
    return total


def _kernels() -> Any:
    """Import the kernels' module, which needs Triton.

    Typed `Any`, because type checkers cannot analyze Triton functions.
    """
    return importlib.import_module("lowtide.attention.halo.kernels")
