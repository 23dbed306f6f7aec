"""A layout: how a program is cut into segments and bands, and where its pages are."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.core.units import MIB
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.planner.cost_model import CostModel


@dataclass(frozen=True)
class StreamLayout:
    """A way to run a program: cuts, recompute effort, bands and page places.

    Attributes:
        cuts: Steps before which the program is cut into segments.
        recompute_limit: Effort up to which operators are recomputed rather than their results kept.
        segments: The segments.
        bands: Number of bands of each segment.
        placement: Where pages are kept.
        peak_bytes: Peak of the rows in memory (estimated, for a draft).
        calls: Number of operator calls.
        copied_bytes: Bytes concatenated for operators (of low bands mostly rows that two bands
            see), and bytes read and written by recomputed operators.
        spilled_bytes: Sum of the pages that are not held in memory.
        pages_bytes: Peak of all pages.
        spilled_peak_bytes: Peak of the pages that are not held in memory.
        disk_peak_bytes: Peak of these on disk, where a page is freed as a whole.
        cost_model: Cost model that turns all this into seconds.
        resident: Pages that stay in memory wherever the others are.
    """

    cuts: tuple[int, ...]
    recompute_limit: int
    segments: list[Segment]
    bands: tuple[int, ...]
    placement: Placement
    peak_bytes: int
    calls: int
    copied_bytes: int
    spilled_bytes: int
    pages_bytes: int
    spilled_peak_bytes: int
    disk_peak_bytes: int
    cost_model: CostModel
    resident: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        """Key that identifies the layout among those of its program."""
        return (
            self.cuts,
            self.recompute_limit,
            self.bands,
            self.placement,
            tuple(sorted(self.resident)),
        )

    @property
    def overhead_seconds(self) -> float:
        """Estimated seconds in addition to the operators' own time."""
        cost_model = self.cost_model
        speed, copying = (
            cost_model.spill_bytes_per_second.get(self.placement),
            self.copied_bytes / cost_model.copy_bytes_per_second,
        )
        moving = 2 * self.spilled_bytes / speed if speed else 0.0
        return self.calls * cost_model.call_seconds + moving + copying

    @property
    def cost(self) -> float:
        """Cost to compare layouts by: overhead seconds, and memory priced in seconds."""
        return self.overhead_seconds + self.peak_bytes / MIB * self.cost_model.seconds_per_mib
