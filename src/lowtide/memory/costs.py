"""Cost model of a network: memory and time as functions of input pixels.

Measured by probes and traces, then interpolated and extrapolated.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Sequence
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

from lowtide.core.heap import MMAP_THRESHOLD_BYTES
from lowtide.core.option import Precision
from lowtide.core.units import MIB

_MULTIPLY_ADDS = operator.attrgetter("multiply_adds")
_UNPROBED_FACTOR = 1.25
_LARGEST_PROBE = 512 * 512  # pixels of the largest run that a model is probed with on the CPU
# Multiply-adds per second of one thread, and bytes alive in a run up to which the speed is that of
# the smallest: above that each doubling takes a seventh more, as data leave the caches. Eight
# networks took 1.1 to 2 times as long per pixel with 100 to 150 MiB alive as with less.
_MACS_PER_SECOND, _CPU_CACHE_BYTES, _CACHE_MISS_EXPONENT = 3e10, 32 * MIB, 0.2
# Thresholds of block sizes, in steps of half an octave, by which traces record what is alive in
# smaller blocks. The blocks of a larger run are larger by the ratio of the pixels.
BLOCK_SIZES = tuple(round(MMAP_THRESHOLD_BYTES * 2 ** (-step / 2)) for step in range(8, -1, -1))

# Tolerance for rounding: up to this factor, a larger size is explained by growth alone.
_GROWTH_TOLERANCE = 1.2
# Runs in tiles of 11 models: 1.0 to 3.4 times the most bytes alive in such blocks, mostly 2 to 2.6.
_HEAP_GROWTH = 2.3


class ProbePoint(BaseModel):
    """One probe run: input pixels, bytes alive at its peak, resident bytes, seconds."""

    model_config = ConfigDict(frozen=True)

    pixels: int
    peak_bytes: int
    resident_bytes: int
    seconds: float


class ReusedBlockBytes(BaseModel):
    """Bytes of a run in blocks that a heap which keeps freed memory would reuse.

    ``at_run_peak`` are those alive at the run's peak, ``max_live`` the most alive at once.
    """

    model_config = ConfigDict(frozen=True)

    at_run_peak: float
    max_live: float

    @property
    def retained_bytes(self) -> int:
        """Bytes that such a heap holds at the peak beyond those alive.

        The heap has grown for the most alive at once, and by gaps that no block fits into.
        """
        return max(0, round(_HEAP_GROWTH * self.max_live - self.at_run_peak))

    def scaled(self, factor: float) -> ReusedBlockBytes:
        """Return both byte counts multiplied by ``factor``."""
        return ReusedBlockBytes(
            at_run_peak=self.at_run_peak * factor, max_live=self.max_live * factor
        )


class TracedPoint(BaseModel):
    """One traced run: input pixels, and bytes alive at its peak.

    ``reused_blocks`` are the bytes in blocks below each of `BLOCK_SIZES`; empty for a run on a GPU.
    ``multiply_adds`` are those of the run; 0 where they were not counted.
    """

    model_config = ConfigDict(frozen=True)

    pixels: int
    peak_bytes: int
    reused_blocks: tuple[ReusedBlockBytes, ...]
    multiply_adds: int = 0


class ModelCosts(BaseModel):
    """Measured costs of one model on one device at one precision.

    ``receptive_field`` is the receptive field: how many input pixels away from its own position an
    output pixel depends on. None means that no bound was found within
    ``receptive_field_search_limit`` pixels, and tiles then differ from the whole image.
    ``context_bytes`` is what the driver takes on the device. ``batchable`` says whether a batch
    gave the same results as single runs. ``points`` were run, ``traced_points`` only traced, at
    sizes far larger; a network that cannot be traced has none. The network pads its input's sides
    to multiples of ``padding_multiple``, and costs what the padded sides cost. ``threads`` is the
    number of CPU threads that computed.
    """

    model_config = ConfigDict(frozen=True)

    sha256: str
    device: str
    precision: Precision
    weight_bytes: int
    channels_last: bool
    batchable: bool
    context_bytes: int = 0
    receptive_field: int | None
    receptive_field_search_limit: int
    padding_multiple: int = 1
    threads: int = 1
    clock_ratio: float = 1.0
    points: tuple[ProbePoint, ...] = ()
    traced_points: tuple[TracedPoint, ...] = ()

    @property
    def only_whole(self) -> bool:
        """Whether nothing is known about tiles, since no receptive field was searched."""
        return self.receptive_field_search_limit == 0

    @property
    def timed_pixels(self) -> tuple[int, ...]:
        """Pixels of the runs that set the seconds: those of the probes, or of traces as large."""
        if self.points:
            return tuple(point.pixels for point in self.points)
        traced = [point.pixels for point in self.traced_points]
        return tuple(one for one in traced if one <= _LARGEST_PROBE) or (traced[0],)

    def activation_bytes(self, pixels: int) -> int:
        """Return bytes alive at the peak of a run on ``pixels`` input pixels.

        ``pixels`` are those of the whole batch.

        Linear interpolation between traced sizes. Beyond them, and where none were traced, a line
        through the two largest sizes, or a parabola where three show that it bends upward
        (attention over the whole map); never below a smaller size.
        """
        if self.traced_points:
            return _interpolate([(p.pixels, p.peak_bytes) for p in self.traced_points], pixels)
        return self._probed_bytes(pixels)

    def _probed_bytes(self, pixels: int) -> int:
        return _extrapolate([(p.pixels, p.peak_bytes) for p in self.points], pixels)

    def slack_bytes(self, pixels: int) -> int:
        """Return bytes that the allocator holds at the peak beyond those alive.

        Interpolated between the probes. Beyond them never below theirs: what a heap kept for small
        blocks stays. Without probes what a heap that keeps freed blocks holds of those traced.
        """
        if not self.points:
            reused = self.reused_blocks(pixels)
            return 0 if reused is None else reused.retained_bytes
        slacks = [(p.pixels, max(0, p.resident_bytes - p.peak_bytes)) for p in self.points]
        if pixels <= slacks[-1][0]:
            return _interpolate(slacks, max(pixels, slacks[0][0]))
        resident = _extrapolate([(p.pixels, p.resident_bytes) for p in self.points], pixels)
        return max(resident - self._probed_bytes(pixels), *(slack for _, slack in slacks))

    def reused_blocks(self, pixels: int) -> ReusedBlockBytes | None:
        """Return bytes of a run in blocks that the heap reuses; None without such a trace.

        Blocks either grow with the pixels or are parts of a fixed size. Where the next smaller
        traced size, scaled up, does not explain the next larger one, there are such parts: the
        estimate that leaves more in the heap counts then.
        """
        known = [point for point in self.traced_points if point.reused_blocks]
        if not known:
            return None
        number = bisect.bisect_right([point.pixels for point in known], pixels) - 1
        smaller = known[max(number, 0)]
        scaled = _scale_to_pixels(smaller, pixels)
        # Beyond all traced sizes the last two say whether there are such parts.
        left = max(min(number, len(known) - 2), 0)
        right = known[min(left + 1, len(known) - 1)]
        if (
            right.reused_blocks[-1].max_live
            <= _GROWTH_TOLERANCE * _scale_to_pixels(known[left], right.pixels).max_live
        ):
            return scaled
        parts = (
            point.reused_blocks[-1].scaled(min(1.0, pixels / point.pixels))
            for point in (smaller, right)
        )
        return max(scaled, *parts, key=lambda one: one.retained_bytes)

    @property
    def time_scale(self) -> float:
        """Factor that converts the seconds of the work model to this machine's seconds.

        Where a trace counted the work, plans are ranked by work, which is the same each time:
        ranked by measured time, the choice of plan and so the rounding would vary between runs.
        Only the reported seconds follow the clock, all by this one factor. 1 where plans are ranked
        by measured seconds.
        """
        if not self._has_mac_counts:
            return 1.0
        if not self.points:
            return self.clock_ratio
        largest = self.points[-1]
        return largest.seconds / self._work_seconds(largest.pixels)

    @property
    def least_seconds_per_pixel(self) -> float:
        """Seconds per pixel of the probed size with the highest throughput."""
        return min(self.seconds(pixels) / pixels for pixels in self.timed_pixels)

    @property
    def _has_mac_counts(self) -> bool:
        return len(self.traced_points) > 1 and all(map(_MULTIPLY_ADDS, self.traced_points))

    def _work_seconds(self, pixels: int) -> float:
        """Return the seconds of a run from its work and bytes alive, on a typical CPU.

        Below the smallest traced size, fixed costs dominate and the time is constant.
        """
        pixels = max(pixels, self.traced_points[0].pixels)
        work = _interpolate([(p.pixels, p.multiply_adds) for p in self.traced_points], pixels)
        cache_factor = (
            max(1.0, self.activation_bytes(pixels) / _CPU_CACHE_BYTES) ** _CACHE_MISS_EXPONENT
        )
        return work / (_MACS_PER_SECOND * self.threads) * cache_factor

    def seconds(self, pixels: int) -> float:
        """Return the predicted seconds of a run on ``pixels`` input pixels.

        From the run's work and this machine's `time_scale`, or where work was not counted, from the
        probes: seconds per pixel are interpolated over the logarithm of the size, and beyond the
        largest probe keep rising as they rose (memory gets no faster). Above twice the largest
        probe a quarter is added, since such runs outgrow what the heap reuses. Below the smallest,
        fixed costs dominate and the time is constant.
        """
        if self._has_mac_counts:
            return self.time_scale * self._work_seconds(pixels)
        points, low, high, share = self.points, 0.0, 0.0, 0.0
        if pixels <= points[0].pixels:
            return points[0].seconds
        for (left, right), (low, high) in zip(
            pairwise(points), pairwise(self._probed_seconds_per_pixel()), strict=True
        ):
            share = math.log(pixels / left.pixels) / math.log(right.pixels / left.pixels)
            if pixels <= right.pixels:
                return pixels * (low + share * (high - low))
        untried = _UNPROBED_FACTOR if pixels > 2 * points[-1].pixels else 1.0
        return pixels * max(high, low + share * (high - low)) * untried

    def _probed_seconds_per_pixel(self) -> list[float]:
        """Return seconds per pixel at each probe, none above both of its neighbors'.

        Small sizes are slower because of fixed costs, large ones because they outgrow caches: a
        size in between that is slower than both was disturbed while it was measured.
        """
        measured = [point.seconds / point.pixels for point in self.points]
        between = [
            min(one, max(left, right))
            for left, one, right in zip(measured, measured[1:], measured[2:], strict=False)
        ]
        return [*measured[:1], *between, *measured[1:][-1:]]


def _scale_to_pixels(point: TracedPoint, pixels: int) -> ReusedBlockBytes:
    """Return `ReusedBlockBytes` of the run with every block scaled to ``pixels``."""
    times = pixels / point.pixels
    # The next larger recorded threshold: rather too many blocks than too few.
    below = bisect.bisect_left(BLOCK_SIZES, min(MMAP_THRESHOLD_BYTES / times, MMAP_THRESHOLD_BYTES))
    return point.reused_blocks[below].scaled(times)


def fit_growth(points: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Fit (fixed, per pixel, per pixel²) bytes to (pixels, bytes), none negative."""
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


def _interpolate(points: Sequence[tuple[int, int]], pixels: int) -> int:
    for (left, left_bytes), (right, right_bytes) in pairwise(points):
        if left <= pixels <= right:
            share = (pixels - left) / (right - left)
            return math.ceil(left_bytes + share * (right_bytes - left_bytes))
    return _extrapolate(points, pixels)


def _extrapolate(points: Sequence[tuple[int, int]], pixels: int) -> int:
    fixed, linear, square = fit_growth(points)
    floor = max((count for size, count in points if size <= pixels), default=0)
    return max(floor, math.ceil(fixed + linear * pixels + square * pixels * pixels))
