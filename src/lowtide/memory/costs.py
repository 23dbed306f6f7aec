"""What a model costs as a function of the pixels given to it at once: measured, then fitted."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

from lowtide.core.heap import REUSED_BELOW
from lowtide.core.precision import Precision
from lowtide.core.units import MIB

_UNTRIED = 1.25
# Multiply-adds in a second of one thread, and bytes alive in a run up to which its pace is that of
# the smallest: from there on each doubling takes a seventh more, as it leaves the caches. Eight
# networks took 1.1 to 2 times as long a pixel with 100 to 150 MiB alive as with less.
_PER_SECOND, _CACHED_BYTES, _LEAVING_CACHES = 3e10, 32 * MIB, 0.2
# Sizes of blocks, half an octave apart, by which traces tell what lives in smaller ones: those of
# a larger run are as many times as large.
BLOCK_SIZES = tuple(round(REUSED_BELOW * 2 ** (-step / 2)) for step in range(8, -1, -1))

# How much more than what grew a larger size may have, by rounding.
_ALL_GROW = 1.2
# Runs in tiles of 11 models: 1.0 to 3.4 times what lives in such blocks at most, mostly 2 to 2.6.
_GROWS_TO = 2.3


class ProbePoint(BaseModel):
    """One tiny run: input pixels, bytes alive at its peak, bytes resident then, seconds."""

    model_config = ConfigDict(frozen=True)

    pixels: int
    peak_bytes: int
    resident_bytes: int
    seconds: float


class ReusedBlocks(BaseModel):
    """Bytes of a run in blocks that a heap which keeps them takes from what it kept: those alive at
    the run's peak, and most at once."""

    model_config = ConfigDict(frozen=True)

    at_peak: float
    most: float

    @property
    def kept(self) -> int:
        """What such a heap holds at the peak beyond what lives: it grew for the most, and by gaps
        that no block fits into."""
        return max(0, round(_GROWS_TO * self.most - self.at_peak))

    def times(self, factor: float) -> ReusedBlocks:
        """So many times as much."""
        return ReusedBlocks(at_peak=self.at_peak * factor, most=self.most * factor)


class TracedPoint(BaseModel):
    """Input pixels, and the bytes alive at the peak of a run on them, as a trace tells.

    ``reused`` are those in blocks below each of `BLOCK_SIZES`; a run on a card has none.
    ``multiply_adds`` are those of the run; 0 where they were not counted.
    """

    model_config = ConfigDict(frozen=True)

    pixels: int
    peak_bytes: int
    reused: tuple[ReusedBlocks, ...]
    multiply_adds: int = 0


class ModelCosts(BaseModel):
    """Measured facts of one model on one device at one precision.

    ``reach`` is how many input pixels beyond its own place an output pixel depends on; None
    means that no bound was found within ``reach_searched`` pixels, and tiles then differ from
    the whole. ``context_bytes`` is what the driver takes on the device. ``batchable`` says
    whether a batch gave the same results as single runs. ``points`` were run, ``traced`` only
    traced, at sizes far beyond; a network that cannot be traced has none. Inside, the network pads
    the sides of what it gets to multiples of ``grain``, and takes what the padded sides take.
    ``threads`` are those that computed.
    """

    model_config = ConfigDict(frozen=True)

    sha256: str
    device: str
    precision: Precision
    weight_bytes: int
    channels_last: bool
    batchable: bool
    context_bytes: int = 0
    reach: int | None
    reach_searched: int
    grain: int = 1
    threads: int = 1
    points: tuple[ProbePoint, ...]
    traced: tuple[TracedPoint, ...] = ()

    def activation_bytes(self, pixels: int) -> int:
        """Bytes alive at the peak of a run on ``pixels`` input pixels (a whole batch together).

        Between traced sizes it follows the line that joins them. Beyond them, and where none
        were traced, it is a line through the two largest sizes, and where three show that it
        bends upward (attention over the whole map), a parabola; never below a smaller one.
        """
        if self.traced:
            return _follow([(p.pixels, p.peak_bytes) for p in self.traced], pixels)
        return self._probed_bytes(pixels)

    def _probed_bytes(self, pixels: int) -> int:
        return _extrapolate([(p.pixels, p.peak_bytes) for p in self.points], pixels)

    def slack_bytes(self, pixels: int) -> int:
        """Bytes that the allocator holds at that peak beyond those alive, as in the probes.

        Beyond the probes never below what they had: what a heap kept for small blocks stays.
        """
        kept = [(p.pixels, max(0, p.resident_bytes - p.peak_bytes)) for p in self.points]
        if pixels <= kept[-1][0]:
            return _follow(kept, max(pixels, kept[0][0]))
        resident = _extrapolate([(p.pixels, p.resident_bytes) for p in self.points], pixels)
        return max(resident - self._probed_bytes(pixels), *(slack for _, slack in kept))

    def reused(self, pixels: int) -> ReusedBlocks | None:
        """What of a run lives in blocks that a heap which keeps reuses; None where no trace says.

        Blocks grow with the pixels, or are parts of one size. Where the next smaller size traced,
        grown, does not explain the next larger one, there are such parts: the one of both that
        leaves more counts then.
        """
        known = [point for point in self.traced if point.reused]
        if not known:
            return None
        number = bisect.bisect_right([point.pixels for point in known], pixels) - 1
        smaller = known[max(number, 0)]
        grown = _grown(smaller, pixels)
        # Beyond all of them the last two say whether there are parts.
        left = max(min(number, len(known) - 2), 0)
        right = known[min(left + 1, len(known) - 1)]
        if right.reused[-1].most <= _ALL_GROW * _grown(known[left], right.pixels).most:
            return grown
        parts = (
            point.reused[-1].times(min(1.0, pixels / point.pixels)) for point in (smaller, right)
        )
        return max(grown, *parts, key=lambda one: one.kept)

    @property
    def speed(self) -> float:
        """What the seconds of plans are multiplied by, so that they are this machine's.

        Where a trace counted the work, plans are ranked by that, which is the same each time: by a
        clock it would be another plan now and then, and another rounding. Only the seconds that
        are told follow the clock, all of them alike. 1 where plans are ranked by measured seconds.
        """
        if not self._counted:
            return 1.0
        largest = self.points[-1]
        return largest.seconds / self._work_seconds(largest.pixels)

    @property
    def least_seconds_per_pixel(self) -> float:
        """Those of the size that was run at the best pace."""
        return min(self.seconds(point.pixels) / point.pixels for point in self.points)

    @property
    def _counted(self) -> bool:
        return len(self.traced) > 1 and all(point.multiply_adds for point in self.traced)

    def _work_seconds(self, pixels: int) -> float:
        """What a run takes by its work and the bytes that are alive meanwhile, on a usual
        processor. Below the smallest size that was traced, fixed costs rule."""
        pixels = max(pixels, self.traced[0].pixels)
        work = _follow([(p.pixels, p.multiply_adds) for p in self.traced], pixels)
        leaving = max(1.0, self.activation_bytes(pixels) / _CACHED_BYTES) ** _LEAVING_CACHES
        return work / (_PER_SECOND * self.threads) * leaving

    def seconds(self, pixels: int) -> float:
        """Predicted seconds of a run on ``pixels`` input pixels: its work at this machine's
        `speed`, or where that was not counted, as it was measured.

        Measured seconds per pixel follow the logarithm of the size between the probes, and beyond
        the largest go on as they rose: memory gets no faster. Sizes far beyond it are taken for a
        quarter slower, since they outgrow what the heap reuses. Below the smallest, fixed
        costs rule.
        """
        if self._counted:
            return self.speed * self._work_seconds(pixels)
        points, low, high, share = self.points, 0.0, 0.0, 0.0
        if pixels <= points[0].pixels:
            return points[0].seconds
        for (left, right), (low, high) in zip(
            pairwise(points), pairwise(self._paces()), strict=True
        ):
            share = math.log(pixels / left.pixels) / math.log(right.pixels / left.pixels)
            if pixels <= right.pixels:
                return pixels * (low + share * (high - low))
        untried = _UNTRIED if pixels > 2 * points[-1].pixels else 1.0
        return pixels * max(high, low + share * (high - low)) * untried

    def _paces(self) -> list[float]:
        """Seconds per pixel at each probe, none above both of its neighbors'.

        Small sizes are slower for what is fixed, large ones for outgrowing caches: a size between
        that seems slower than either was disturbed while it was measured.
        """
        measured = [point.seconds / point.pixels for point in self.points]
        between = [
            min(one, max(left, right))
            for left, one, right in zip(measured, measured[1:], measured[2:], strict=False)
        ]
        return [*measured[:1], *between, *measured[1:][-1:]]


def _grown(point: TracedPoint, pixels: int) -> ReusedBlocks:
    """The same run on other pixels, each block so many times as large."""
    times = pixels / point.pixels
    # The next larger size that was told of: rather too many blocks than too few.
    below = bisect.bisect_left(BLOCK_SIZES, min(REUSED_BELOW / times, REUSED_BELOW))
    return point.reused[below].times(times)


def fit_growth(points: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """(fixed, per pixel, per pixel²) bytes through (pixels, bytes), none of them negative."""
    (left, left_bytes), (right, right_bytes) = points[-2:]
    linear = (right_bytes - left_bytes) / (right - left)
    if len(points) >= 3:
        first, first_bytes = points[-3]
        slope = (left_bytes - first_bytes) / (left - first)
        square = (linear - slope) / (right - first)
        # A bend of a few percent is rounding of small buffers, not attention over the map.
        if linear > 1.1 * slope > 0:
            linear = slope - square * (first + left)
            fixed = first_bytes - linear * first - square * first**2
            return max(fixed, 0.0), max(linear, 0.0), square
    linear = max(linear, 0.0)
    return max(right_bytes - linear * right, 0.0), linear, 0.0


def _follow(points: Sequence[tuple[int, int]], pixels: int) -> int:
    for (left, left_bytes), (right, right_bytes) in pairwise(points):
        if left <= pixels <= right:
            share = (pixels - left) / (right - left)
            return math.ceil(left_bytes + share * (right_bytes - left_bytes))
    return _extrapolate(points, pixels)


def _extrapolate(points: Sequence[tuple[int, int]], pixels: int) -> int:
    fixed, linear, square = fit_growth(points)
    floor = max((count for size, count in points if size <= pixels), default=0)
    return max(floor, math.ceil(fixed + linear * pixels + square * pixels * pixels))
