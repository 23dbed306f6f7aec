"""A layout: how a program is cut into segments and bands, where its pages are, what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowtide.core.units import GIB, MIB
from lowtide.memory.profiles import DeviceProfile
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment


@dataclass(frozen=True)
class CostModel:
    """Overhead of streamed runs beyond the operators' own time, on one device.

    Only for comparing layouts.

    Attributes:
        call_seconds: Overhead between two operator calls.
        copy_bytes_per_second: Bytes per second that light operators and copies of rows read and
            write.
        spill_bytes_per_second: Bytes per second of a disk or a GPU's bus, by place of the pages.
        seconds_per_mib: Seconds that one more MiB must save.
    """

    call_seconds: float
    copy_bytes_per_second: int
    spill_bytes_per_second: Mapping[str, int]
    seconds_per_mib: float


CPU = CostModel(7e-5, 5 * GIB, {"disk": GIB, "host": 10 * GIB}, 2e-4)
# A GPU idles until the next operator is launched, and higher bands need fewer launches; its memory
# is hardly used by anything else.
GPU = CostModel(1.2e-4, 200 * GIB, {"disk": GIB, "host": 12 * GIB}, 2e-6)
# Share of a GPU's bandwidth that copies of rows reach, and of a bus that copies to the host reach.
_BANDWIDTH_SHARE, _BUS_SHARE = 0.7, 0.8


def cost_model_for(program: StreamProgram, profile: DeviceProfile | None = None) -> CostModel:
    """Return the cost model of the device that a program was captured on, or of a GPU's profile."""
    if profile is None:
        return CPU if program.graph.on_cpu else GPU
    bus = profile.pcie_bytes_per_s or GPU.spill_bytes_per_second["host"]
    return replace(
        GPU,
        copy_bytes_per_second=min(
            GPU.copy_bytes_per_second, int(profile.bandwidth_bytes_per_s * _BANDWIDTH_SHARE)
        ),
        spill_bytes_per_second={**GPU.spill_bytes_per_second, "host": int(bus * _BUS_SHARE)},
    )


@dataclass(frozen=True)
class StreamLayout:
    """A way to run a program: cuts, bands and page places.

    Attributes:
        cuts: Steps before which the program is cut into segments.
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
        return self.cuts, self.bands, self.placement, tuple(sorted(self.resident))

    @property
    def overhead_seconds(self) -> float:
        """Estimated seconds in addition to the operators' own time."""
        model = self.cost_model
        speed = model.spill_bytes_per_second.get(self.placement)
        moving = 2 * self.spilled_bytes / speed if speed else 0.0
        copying = self.copied_bytes / model.copy_bytes_per_second
        return self.calls * model.call_seconds + moving + copying

    @property
    def cost(self) -> float:
        """Cost to compare layouts by: overhead seconds, and memory priced in seconds."""
        return self.overhead_seconds + self.peak_bytes / MIB * self.cost_model.seconds_per_mib
