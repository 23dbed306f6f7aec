"""Grid of local windows along an axis: which pixels are queries and which keys, and blending.

Grids are pure Python integers. A *halo* window computes a block of ``size - shared`` pixels, which
see the ``size`` pixels around them: blocks touch, so each pixel is computed once (HaloNet, arXiv
2103.12731). *Blended* windows of ``size`` pixels overlap by ``shared``, each attends within itself,
and results are blended. Both have a stride of ``size - shared`` pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor

from lowtide.core.errors import UsageError

Form = Literal["halo", "blended"]
Boundary = Literal["mask", "shift", "zero", "reflect"]


@dataclass(frozen=True)
class WindowGeometry:
    """Size, overlap and boundary mode of local windows.

    Windows are ``size`` × ``size`` pixels and share ``shared`` pixels with each neighbor.
    ``boundary`` is what a window sees beyond the image: nothing (``"mask"``), nothing because it is
    shifted inside (``"shift"``, as in NATTEN), zeros for key and value (``"zero"``, as in HAT), or
    the mirrored image without its edge repeated (``"reflect"``). ``phase`` is how many rows and
    columns before the image the grid of windows begins, less than a step.
    """

    size: int = 32
    shared: int = 8
    form: Form = "halo"
    boundary: Boundary = "mask"
    phase: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for what, known in (("form", Form), ("boundary", Boundary)):
            if getattr(self, what) not in get_args(known):
                names = ", ".join(get_args(known))
                raise UsageError(f"{what} {getattr(self, what)!r} is not one of {names}")
        most = self.size // 2 if self.form == "blended" else self.size - 1
        if self.size < 1 or not 0 <= self.shared <= most:
            raise UsageError(
                f"{self.form} windows of {self.size} px cannot overlap by {self.shared} px",
                hint=f"0 to {max(most, 0)}",
            )
        if self.form == "halo" and self.shared % 2:
            raise UsageError(
                f"halo windows overlap equally on both sides: {self.shared} px is odd",
                hint=f"shared={self.shared - 1} or {self.shared + 1}",
            )
        if not all(0 <= phase < self.stride for phase in self.phase):
            raise UsageError(f"phase {self.phase} is not within a stride of {self.stride} px")

    @property
    def stride(self) -> int:
        """Stride between windows in pixels; a halo window computes as many."""
        return self.size - self.shared

    @property
    def halo(self) -> int:
        """Halo of a window: pixels seen beyond the computed ones, on each side."""
        return self.shared // 2 if self.form == "halo" else 0

    @property
    def query_size(self) -> int:
        """Pixels along an axis for which a window computes a result."""
        return self.stride if self.form == "halo" else self.size

    @property
    def max_distance(self) -> int:
        """Greatest distance along an axis from a query to a key, in pixels."""
        inside = self.form == "blended" or self.boundary == "shift"
        return self.size - 1 if inside else self.stride - 1 + self.halo

    def count(self, length: int, phase: int) -> int:
        """Return the number of windows along an axis; ``length`` may be symbolic."""
        if self.form == "halo":
            return (length + phase + self.stride - 1) // self.stride
        # An axis that ends within the first window's overlap still has that window.
        return max((length + phase - self.shared + self.stride - 1) // self.stride, 1)


@dataclass(frozen=True)
class AxisWindow:
    """One window along an axis: the pixels it computes, and those it sees.

    Queries are inside the image. Keys may be outside with the boundaries ``zero`` and ``reflect``.
    ``start`` and ``size`` are the window before cropping, for its blending weights.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int
    start: int
    size: int


def windows_along(windows: WindowGeometry, length: int, phase: int) -> list[AxisWindow]:
    """Return all windows of an axis of ``length`` pixels, in order."""
    found = []
    for place in range(windows.count(length, phase)):
        start = place * windows.stride - phase
        first, last = start, start + windows.query_size
        key, end = start - windows.halo, start + windows.stride + windows.halo
        if windows.form == "blended":
            end = last
        if windows.boundary == "shift":
            size = min(windows.size, length)
            key = min(max(key, 0), length - size)
            end = key + size
            if windows.form == "blended":
                first, last = key, end
        elif windows.boundary == "mask":
            key, end = max(key, 0), min(end, length)
        first, last = max(first, 0), min(last, length)
        whole = (key, end - key) if windows.boundary == "shift" else (start, windows.query_size)
        found.append(AxisWindow(first, last - first, key, end - key, *whole))
    return found


@dataclass(frozen=True)
class WindowRun:
    """Consecutive windows of equal shape: the first, their number and their stride.

    ``stride`` is the stride in pixels.
    """

    window: AxisWindow
    count: int = 1
    stride: int = 1


def window_runs(windows: list[AxisWindow], max_count: int) -> list[WindowRun]:
    """Group consecutive windows of equal shape, at most ``max_count``, to run at once."""
    gathered: list[WindowRun] = []
    for before, one in zip([None, *windows], windows, strict=False):
        last = gathered[-1] if gathered else None
        if before is not None and last is not None and _shape(before) == _shape(one):
            apart = one.first_query - before.first_query
            fits = last.count == 1 or apart == last.stride
            if apart > 0 and fits and last.count < max_count:
                gathered[-1] = WindowRun(last.window, last.count + 1, apart)
                continue
        gathered.append(WindowRun(one))
    return gathered


def _shape(one: AxisWindow) -> tuple[int, int, int]:
    return one.queries, one.keys, one.first_key - one.first_query


def reflect_position(position: int, length: int) -> int:
    """Reflect a position outside the image to a pixel inside it."""
    if length == 1:
        return 0
    period = 2 * (length - 1)
    position %= period
    return min(position, period - position)


def blend_shares(
    windows: WindowGeometry, found: list[AxisWindow], length: int
) -> list[list[float]]:
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
    columns: list[AxisWindow], shares: list[list[float]], width: int
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
