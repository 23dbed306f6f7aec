"""Window attention with all windows at once, exportable for dynamic image sizes.

Only for export: it takes far more memory than `row_windows`, and gives the same result. What
depends on the size alone, window indices and rotary angles, is as large a graph as the rest of a
small block: an exported network computes it once for all blocks, within `trace_cache`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.spatial.position import PositionEncoding
from lowtide.attention.spatial.window_grid import WindowGeometry, blend_along
from lowtide.core.trace_cache import cached_in_trace


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, windows: WindowGeometry, position: PositionEncoding
) -> Tensor:
    """Attend within all windows at once; all tensors are (B, H, W, heads, head dim)."""
    size = windows, *query.shape[1:3], query.device, query.dtype
    down, right = cached_in_trace(("axes", *size), lambda: _axes(windows, query))
    if windows.boundary == "zero":
        key, value = (_gather_zero_padded(t, down, right) for t in (key, value))
    else:
        key, value = (_gather_windows(tensor, down.key, right.key) for tensor in (key, value))
    query = _gather_windows(query, down.query, right.query)
    batch, tall, wide = query.shape[:3]
    turned = cached_in_trace(
        ("turns", *size, position.rotation_key), lambda: _turns(position, down, right, query.dtype)
    )
    query, key = (position.rotate(*one) for one in zip((query, key), turned, strict=True))
    bias = _bias(position, down, right, windows.max_distance, query.dtype)
    query, key, value = (tensor.flatten(3, 4).flatten(0, 2) for tensor in (query, key, value))
    if windows.boundary in ("mask", "shift"):
        unseen = cached_in_trace(("unseen", *size), lambda: _outside_mask(down, right, query.dtype))
        query, key = _mask_by_channel(query, key, unseen)
    if bias is not None and len(bias) > 1:
        bias = bias.repeat(batch, 1, 1, 1)
    scale = value.shape[-1] ** -0.5
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, bias, scale=scale).transpose(1, 2)
    side = windows.query_size
    found = found.reshape(batch, tall, wide, side, side, *found.shape[2:])
    found = found.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return blend_along(blend_along(found, 1, down.sources), 2, right.sources)


@dataclass(frozen=True)
class _Axis:
    """Window indices along one axis as tensors: w windows of q queries and k keys.

    ``query`` and ``key`` are pixels within the image, (w, q) and (w, k). ``query_offset`` and
    ``key_offset`` are their positions relative to the window's first key, (1 or w, ...). ``inside``
    is True where a key is a pixel of the image. ``sources`` are pairs (index, weight), each as long
    as the axis: the weight of one of the w · q results at each pixel.
    """

    query: Tensor
    key: Tensor
    query_offset: Tensor
    key_offset: Tensor
    inside: Tensor
    sources: list[tuple[Tensor, Tensor | None]]

    @staticmethod
    def of(windows: WindowGeometry, length: int, phase: int, device: torch.device) -> _Axis:
        """Compute the windows of an axis of ``length`` pixels, which may be symbolic."""
        count = windows.count(length, phase)
        start = torch.arange(count, device=device)[:, None] * windows.stride - phase
        queries = torch.arange(windows.query_size, device=device)[None]
        keys = torch.arange(windows.size, device=device)[None]
        first_key = start - windows.halo
        if windows.boundary == "shift":
            first_key = first_key.clamp_max(length - windows.size).clamp_min(0)
            start = first_key if windows.form == "blended" else start
            query_at = start + queries - first_key
        else:
            query_at = queries + windows.halo
        key = first_key + keys
        inside = (key >= 0) & (key < length)
        key = _mirrored(key, length) if windows.boundary == "reflect" else key
        query = start + queries
        return _Axis(
            query.clamp_min(0).clamp_max(length - 1),
            key.clamp_min(0).clamp_max(length - 1),
            query_at,
            keys,
            inside,
            _sources(windows, start[:, 0], length, phase),
        )


def _axes(windows: WindowGeometry, query: Tensor) -> tuple[_Axis, _Axis]:
    (height, width), (down, right) = query.shape[1:3], windows.phase
    return (
        _Axis.of(windows, height, down, query.device),
        _Axis.of(windows, width, right, query.device),
    )


def _turns(
    position: PositionEncoding, down: _Axis, right: _Axis, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return the rotary angles of queries and of keys.

    Positions are relative to the window, so that all windows that are not shifted share them.
    """
    return (
        position.rotary_factors(down.query_offset[:, None], right.query_offset[None], dtype),
        position.rotary_factors(down.key_offset[:, None], right.key_offset[None], dtype),
    )


def _mirrored(key: Tensor, length: int) -> Tensor:
    # A tensor, because the exporter cannot take a remainder by a symbolic size.
    period = torch.full_like(key, torch.sym_max(2 * (length - 1), 1))
    key = key.remainder(period)
    return torch.minimum(key, period - key)


def _sources(
    windows: WindowGeometry, start: Tensor, length: int, phase: int
) -> list[tuple[Tensor, Tensor | None]]:
    pixel = torch.arange(length, device=start.device)
    if windows.form == "halo":  # blocks touch, so results are contiguous
        return [(pixel + phase, None)]
    usual = (pixel + phase) // windows.stride
    # Windows shifted inside cover pixels of one more window on each side.
    turns = (1, 0, -1, -2) if windows.boundary == "shift" else (0, -1)
    found = []
    for turn in turns:
        place = (usual + turn).clamp_min(0).clamp_max(start.shape[0] - 1)
        offset = pixel - start[place]
        size = windows.size
        if windows.boundary == "shift":
            size = torch.sym_min(length, size)  # of an axis shorter than a window
        covered = (offset >= 0) & (offset < size) & (place == usual + turn)
        share = torch.ones_like(offset, dtype=torch.float32)
        if windows.shared:
            nearest = torch.minimum(offset, -offset + (size - 1))
            share = ((nearest + 0.5) / windows.shared).clamp_max(1.0)
        offset = offset.clamp_min(0).clamp_max(windows.size - 1)
        found.append((place * windows.size + offset, torch.where(covered, share, 0.0)))
    total = sum(share for _, share in found)
    return [(index, share / total) for index, share in found]


def _gather_windows(tensor: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Gather (B, windows down, windows right, rows, columns, heads, head dim)."""
    tensor = tensor.index_select(1, down.flatten()).unflatten(1, down.shape)
    tensor = tensor.index_select(3, right.flatten()).unflatten(3, right.shape)
    return tensor.transpose(2, 3)


def _gather_zero_padded(tensor: Tensor, down: _Axis, right: _Axis) -> Tensor:
    taken = _gather_windows(tensor, down.key, right.key)
    inside = down.inside[:, None, :, None] & right.inside[None, :, None, :]
    return torch.where(inside[..., None, None], taken, torch.zeros_like(taken))


def _bias(
    position: PositionEncoding, down: _Axis, right: _Axis, max_distance: int, dtype: torch.dtype
) -> Tensor | None:
    """Return the position bias, (1 or windows, heads, queries, keys)."""
    distances = (
        axis.key_offset[:, None, :] - axis.query_offset[:, :, None] for axis in (down, right)
    )
    # Pixels beyond the image, whose results are dropped, may be farther than the table covers.
    rows, columns = (distance.clamp(-max_distance, max_distance) for distance in distances)
    return position.bias(rows, columns, dtype)


def _outside_mask(down: _Axis, right: _Axis, dtype: torch.dtype) -> Tensor:
    """Return (windows, keys): a large negative value for keys beyond the image, 0 otherwise."""
    inside = down.inside[:, None, :, None] & right.inside[None, :, None, :]
    least = -1e30 if torch.finfo(dtype).max > 1e30 else -3e4
    return torch.where(inside.flatten(2, 3).flatten(0, 1), 0.0, least).to(dtype)


def _mask_by_channel(query: Tensor, key: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
    """Append a channel that masks by `_outside_mask` to query and key.

    Both are (windows, N, heads, head dim). A mask tensor would be as large as all scores.
    """
    unseen = unseen.repeat(key.shape[0] // unseen.shape[0], 1)[..., None, None]
    key = torch.cat([key, unseen.expand(-1, -1, key.shape[2], -1)], -1)
    return torch.cat([query, torch.ones_like(query[..., :1])], -1), key
