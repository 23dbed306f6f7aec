"""What a run by bands costs beside its operators, on the CPU and on a card: for comparing layouts
only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.core.units import GIB, MIB
from lowtide.streaming.engine.program import StreamProgram


def _caps(*mebibytes: int) -> tuple[int, ...]:
    return tuple(mib * MIB for mib in mebibytes)


@dataclass(frozen=True)
class CostModel:
    """``call_seconds`` go by between two operators; light operators and copies of rows read and
    write ``copied_bytes`` in one, a disk or a card's bus moves those of ``moved_bytes``. Memory
    has to buy time: ``seconds_per_mib`` for each MiB more. ``caps`` are what the bands of a segment
    should stay below, ``small_caps`` those that are tried where memory is scarce.
    """

    call_seconds: float
    copied_bytes: int
    moved_bytes: Mapping[str, int]
    seconds_per_mib: float
    caps: tuple[int, ...]
    small_caps: tuple[int, ...] = _caps(1, 4, 8)


# Bands that stay in the caches are fast.
CPU = CostModel(
    7e-5, 5 * GIB, {"disk": GIB, "host": 10 * GIB}, 2e-4, _caps(16, 32, 64, 128, 256, 512)
)
# A card has nothing to do until it is told the next operator, and the higher bands are, the fewer
# there are of these; its memory is hardly used by anything else.
CARD = CostModel(
    1.2e-4,
    200 * GIB,
    {"disk": GIB, "host": 12 * GIB},
    2e-6,
    _caps(
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        6144,
        8192,
        16384,
    ),
)


def cost_model_for(program: StreamProgram) -> CostModel:
    """That of the device that a program was captured on."""
    return CPU if program.graph.on_cpu else CARD
