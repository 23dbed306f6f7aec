"""Blending of overlapping windows by weights that sum to 1 at every pixel."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from lowtide.attention.spatial.window_grid import Window, Windows


def blend_shares(windows: Windows, found: list[Window], length: int) -> list[list[float]]:
    """Return each window's weight at each of its pixels; weights sum to 1 per pixel."""
    sums = [0.0] * length
    shares = []
    for one in found:
        offsets = range(one.first_query - one.start, one.first_query - one.start + one.queries)
        share = [blend_ramp(offset, one.size, windows.shared) for offset in offsets]
        shares.append(share)
        for pixel, part in enumerate(share, one.first_query):
            sums[pixel] += part
    return [
        [part / sums[pixel] for pixel, part in enumerate(share, one.first_query)]
        for one, share in zip(found, shares, strict=True)
    ]


def blend_ramp(offset: int, size: int, shared: int) -> float:
    """Return the unnormalized blending weight at ``offset`` pixels into a window.

    A linear ramp over the ``shared`` pixels of each side, so that two neighbors sum to 1.
    """
    if shared == 0:
        return 1.0
    nearest = min(offset, size - 1 - offset)
    return min(1.0, (nearest + 0.5) / shared)


def blend_sources(
    columns: list[Window], shares: list[list[float]], width: int
) -> list[tuple[Tensor, Tensor]]:
    """Return (index, weight) pairs that gather the windows' results into columns.

    Index and weight are (width,), int64 and fp64. An index is a position among the results of all
    windows. There are as many pairs as the most windows over one column; missing windows have
    weight 0.
    """
    found: list[list[tuple[int, float]]] = [[] for _ in range(width)]
    place = 0
    for one, share in zip(columns, shares, strict=True):
        for offset in range(one.queries):
            found[one.first_query + offset].append((place, share[offset]))
            place += 1
    most = max(map(len, found))
    full = [given + [(given[0][0], 0.0)] * (most - len(given)) for given in found]
    return [
        (
            torch.tensor([given[turn][0] for given in full]),
            torch.tensor([given[turn][1] for given in full], dtype=torch.float64),
        )
        for turn in range(most)
    ]


def blend_along(
    tensor: Tensor, dim: int, sources: Iterable[tuple[Tensor, Tensor | None]]
) -> Tensor:
    """Gather along ``dim`` and return the weighted sum over all sources.

    Each source is (index, weight), both (n,) for n positions of the result along ``dim``; a weight
    of None is 1. ``tensor`` has any shape, (..., positions, ...).
    """
    shape = [-1, *[1] * (tensor.dim() - dim - 1)]
    parts = (
        part if share is None else part * share.to(tensor).reshape(shape)
        for part, share in (
            (tensor.index_select(dim, index.to(tensor.device)), share) for index, share in sources
        )
    )
    return reduce(torch.add, parts)
