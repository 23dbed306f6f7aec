"""Cost model of streamed layouts, on CPU and GPU: only for comparing layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowtide.core.units import GIB, MIB
from lowtide.memory.profiles import DeviceProfile
from lowtide.streaming.engine.program import StreamProgram


def _caps(*mebibytes: int) -> tuple[int, ...]:
    return tuple(mib * MIB for mib in mebibytes)


@dataclass(frozen=True)
class CostModel:
    """Overhead of streamed runs beyond the operators' own time, on one device.

    Attributes:
        call_seconds: Overhead between two operator calls.
        copy_bytes_per_second: Bytes per second that light operators and copies of rows read and
            write.
        spill_bytes_per_second: Bytes per second of a disk or a GPU's bus, by place of the pages.
        seconds_per_mib: Seconds that one more MiB must save.
        caps: Bytes that the bands of a segment should stay within.
        low_memory_caps: Caps to try where memory is scarce.
    """

    call_seconds: float
    copy_bytes_per_second: int
    spill_bytes_per_second: Mapping[str, int]
    seconds_per_mib: float
    caps: tuple[int, ...]
    low_memory_caps: tuple[int, ...] = _caps(1, 4, 8)


# Small caps included: bands that stay in the caches are fast.
CPU = CostModel(
    7e-5, 5 * GIB, {"disk": GIB, "host": 10 * GIB}, 2e-4, _caps(16, 32, 64, 128, 256, 512)
)
# A GPU idles until the next operator is launched, and higher bands need fewer launches; its memory
# is hardly used by anything else.
GPU = CostModel(
    1.2e-4,
    200 * GIB,
    {"disk": GIB, "host": 12 * GIB},
    2e-6,
    _caps(*sorted([32 << step for step in range(10)] + [48 << step for step in range(8)])),
)


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
