"""Memory that planning takes on a CPU, before the first band runs: expected, and measured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lowtide.core.heap import trim_heap
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.meter import HostMeter
from lowtide.streaming.certificate import proof_map_bytes
from lowtide.streaming.planner.stream_planner import StreamPlanner

# Measured with PyTorch 2.11 on decoders of 41 and of 158 operators: compiled kernels for each
# operator, and reordered copies of the largest weight, among them those the heap has not given
# back. Maps of the proof are there twice: the whole result's and the bands'.
_OPERATOR_BYTES, _WEIGHT_COPIES, _MAP_COPIES = MIB // 4, 4, 2


@dataclass(frozen=True)
class PlanningMemory:
    """Memory that planning a module took on a CPU, beyond what was resident before.

    Attributes:
        expected_bytes: What it was expected to take, besides libraries that PyTorch loads for it.
        peak_bytes: What it took at most, sampled every 20 ms, libraries included.
        held_bytes: What it left: kernels, the captured program, and libraries.
    """

    expected_bytes: int
    peak_bytes: int
    held_bytes: int

    @property
    def title(self) -> str:
        """Description for the user, with a leading separator."""
        expected, *found = map(
            format_bytes, (self.expected_bytes, self.peak_bytes, self.held_bytes)
        )
        return f"; planning: {found[0]} (expected: {expected} and libraries), {found[1]} stay"


def expected_planning_bytes(module: nn.Module, planner: StreamPlanner) -> int:
    """Return about how many bytes planning takes, besides libraries that PyTorch loads for it."""
    program = planner.program
    weight = max((one.nbytes for one in module.parameters()), default=0)
    maps = _MAP_COPIES * proof_map_bytes(planner.inputs, program)
    return _OPERATOR_BYTES * len(program.steps) + _WEIGHT_COPIES * weight + maps


class PlanningMeter:
    """Meter of planning, on a CPU: see `planning_meter`."""

    def __init__(self) -> None:
        self._meter, self._expected, self._kind = HostMeter(), 0, ""

    def expect(self, module: nn.Module, planner: StreamPlanner) -> None:
        """Note what the rest of planning is expected to take."""
        self._expected = expected_planning_bytes(module, planner)
        self._kind = type(module).__name__

    def warn_beyond(self, allowed: int) -> None:
        """Warn if planning may take more than ``allowed`` bytes, the budget."""
        if self._expected > allowed:
            warnings.warn(
                f"planning this {self._kind} takes about"
                f" {format_bytes(self._expected)} and the libraries that PyTorch loads for it, more"
                f" than the budget of {format_bytes(allowed)}; calls after that keep the budget",
                stacklevel=2,
            )

    def expected_held_bytes(self, planner: StreamPlanner) -> int:
        """Return the bytes held now, after the capture, and those of kernels still to come."""
        return self.held_bytes() + _OPERATOR_BYTES * len(planner.program.steps)

    def held_bytes(self) -> int:
        """Return the bytes that planning holds now, with those that are free given back."""
        trim_heap()
        return self._meter.current_bytes

    def result(self) -> PlanningMemory:
        """Return what was measured since the start."""
        held = self.held_bytes()
        return PlanningMemory(self._expected, self._meter.peak_bytes, held)


@contextlib.contextmanager
def planning_meter() -> Iterator[PlanningMeter]:
    """Context manager: measure this process's memory while a module is planned."""
    meter = PlanningMeter()
    meter._meter.start()
    try:
        yield meter
    finally:
        meter._meter.stop()
