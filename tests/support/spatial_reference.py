"""Local window attention as its definition says, window by window, in fp64."""

import torch

from lowtide.attention.spatial.position import (
    FactorizedRelativePositionBias,
    RelativePositionBias,
    Rope2d,
)
from lowtide.attention.spatial.window_grid import WindowGeometry


def mirror(position, length):
    while not 0 <= position < length:
        position = -position if position < 0 else 2 * (length - 1) - position
        if length == 1:
            return 0
    return position


def axis(windows: WindowGeometry, length, phase):
    """For each window: its queries, [(position, pixel or None)] of its keys, its unclipped span."""
    step, found, start = windows.size - windows.shared, [], -phase
    covered = 0
    while covered < length:
        halo = windows.form == "halo"
        queries = list(range(start, start + (step if halo else windows.size)))
        margin = windows.shared // 2 if halo else 0
        keys = list(range(start - margin, start - margin + windows.size))
        span = queries[0], len(queries)
        if windows.boundary == "shift":
            size = min(windows.size, length)
            move = keys[0] - max(0, min(keys[0], length - size))
            keys = [key - move for key in keys[:size]]
            if not halo:
                queries = keys
                span = keys[0], size
        seen = []
        for key in keys:
            if 0 <= key < length:
                seen.append((key, key))
            elif windows.boundary == "zero":
                seen.append((key, None))
            elif windows.boundary == "reflect":
                seen.append((key, mirror(key, length)))
        covered = start + (step if halo else windows.size)
        found.append(([query for query in queries if 0 <= query < length], seen, span))
        start += step
    return found


def fade(windows, span, pixel):
    if windows.form == "halo" or windows.shared == 0:
        return 1.0
    start, size = span
    left, right = pixel - start + 0.5, start + size - pixel - 0.5
    return min(1.0, left / windows.shared, right / windows.shared)


def bias(position, down, right):
    """(heads, queries, keys) of distances (rows, rows) and (columns, columns), or 0."""
    if isinstance(position, RelativePositionBias):
        farthest = position.table.shape[-1] // 2
        found = position.table[:, down + farthest][..., right + farthest]
        return found.permute(0, 1, 3, 2, 4).flatten(3, 4).flatten(1, 2)
    if isinstance(position, FactorizedRelativePositionBias):
        farthest = position.down.shape[-1] // 2
        rows = position.down[:, down + farthest].repeat_interleave(len(right), 1)
        rows = rows.repeat_interleave(right.shape[1], 2)
        columns = position.right[:, right + farthest].repeat(1, *down.shape)
        return rows + columns
    return 0


def rotated(position, tensor, rows, columns):
    """Pairs of channels as complex numbers, turned by the row or by the column."""
    if not isinstance(position, Rope2d):
        return tensor
    halves, dtype = [], tensor.dtype
    tensor = tensor.to(torch.promote_types(dtype, torch.float32))
    for half, positions in zip(
        tensor.chunk(2, -1), (rows[:, None, None, None], columns[None, :, None, None]), strict=True
    ):
        first, second = half[..., ::2], half[..., 1::2]
        pairs = first.shape[-1]
        speeds = 100.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        turned = torch.complex(first, second) * torch.exp(1j * positions * speeds)
        halves.append(torch.stack([turned.real, turned.imag], -1).flatten(-2))
    return torch.cat(halves, -1).to(dtype)


def local_attention(query, key, value, windows, position, scale):
    """(batch, height, width, heads, dim) of the same; positions through the module's own rules."""
    batch, height, width, heads, dim = query.shape
    result = torch.zeros_like(value)
    total = torch.zeros(height, width, dtype=value.dtype)
    blank = torch.zeros(batch, heads, dim, dtype=value.dtype)
    for rows, seen_rows, row_span in axis(windows, height, windows.phase[0]):
        for columns, seen_columns, column_span in axis(windows, width, windows.phase[1]):
            down = torch.tensor([at for at, _ in seen_rows])
            right = torch.tensor([at for at, _ in seen_columns])

            def gathered(tensor, seen_rows=seen_rows, seen_columns=seen_columns):
                grid = [
                    [blank if None in (y, x) else tensor[:, y, x] for _, x in seen_columns]
                    for _, y in seen_rows
                ]
                return torch.stack([torch.stack(row, 1) for row in grid], 1)

            keys = rotated(position, gathered(key), down, right).flatten(1, 2)
            values = gathered(value).flatten(1, 2)
            mine = torch.tensor(rows), torch.tensor(columns)
            queries = rotated(position, query[:, rows][:, :, columns], *mine).flatten(1, 2)
            scores = scale * torch.einsum("bqhd,bkhd->bhqk", queries, keys)
            distances = down - mine[0][:, None], right - mine[1][:, None]
            scores = scores + bias(position, *distances)
            found = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
            share = torch.tensor(
                [
                    [fade(windows, row_span, y) * fade(windows, column_span, x) for x in columns]
                    for y in rows
                ],
                dtype=value.dtype,
            )
            found = found.unflatten(1, (len(rows), len(columns)))
            result[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += (
                found * share[:, :, None, None]
            )
            total[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += share
    return result / total[:, :, None, None]
