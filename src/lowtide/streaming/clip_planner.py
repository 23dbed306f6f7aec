"""Search for the plan of a clip: orders of its chunks, and places of their state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from lowtide.core.errors import BudgetError
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.clip_plan import ChunkProgramRun, ClipPlan, UnrolledChunks
from lowtide.streaming.engine.clip_chunks import CarriedStateBytes, CarriedStateStore, unroll_chunks
from lowtide.streaming.engine.placement import Placement, allowed_placements
from lowtide.streaming.planner.stream_planner import StreamPlanner
from lowtide.streaming.prepared_stream import StreamSettings, prepare_stream

# Chunks that run together at the most. A plan takes the longer, the more operators there are and
# the more rows to make bands of: so many of their product at the most, and so many seconds for each
# (measured: 0.8e-4 to 3e-4, with decoders of 300 to 400 operators a chunk).
_MOST_TOGETHER, _MOST_ROW_STEPS, _SECONDS_PER_ROW_STEP = 8, 300_000, 2e-4
ChunksTogether = int | Literal["auto"]


@dataclass(frozen=True)
class _Section:
    """Runs of the same program: ``times`` times ``chunks`` chunks.

    They begin with the ``first`` chunk, 0, or with a later one, 1.
    """

    first: int
    chunks: int
    times: int
    keep_state: bool


@dataclass(frozen=True)
class ClipPlanner:
    """Plans for a clip of ``count`` chunks.

    Attributes:
        modules: Modules of the first chunk and of later ones.
        alone: Planner of each, later ones with the state as inputs; one if ``count`` is 1.
        settings: Budget and pages; where pages may be, the state may be too.
        count: Number of chunks.
        result_bytes: Bytes of the result of the whole batch, which is held from the start; None
            where results of chunks leave as they are made.
        dim: Dim of the rows.
        together: Number of chunks that run together, or "auto".
    """

    modules: Sequence[nn.Module]
    alone: Sequence[StreamPlanner]
    settings: StreamSettings
    count: int
    result_bytes: int | None
    dim: int
    together: ChunksTogether = "auto"
    _planners: dict[object, StreamPlanner] = field(default_factory=dict, repr=False)

    def choose(self) -> ClipPlan:
        """Return the plan within the budget: the simplest, or else that of least cost.

        Chunks one by one with the state in memory are the simplest: nothing is moved, and rows at
        the edges of bands are held for one chunk alone. With the state elsewhere they take the
        least memory: where they do not fit, nothing does. Several chunks in each band move less,
        which must be worth the longer planning.

        Raises:
            BudgetError: No plan fits; the message names the smallest budget that is enough.
        """
        simplest, *others = self._candidates()
        alone = [one for one in others if one[0] == simplest[0]]
        refusals = list[BudgetError]()

        def fitting(candidates: Iterable[tuple[int, Placement]]) -> Iterator[ClipPlan]:
            for one in candidates:
                try:
                    yield self.plan(*one)
                except BudgetError as refusal:
                    refusals.append(refusal)

        plans = [*fitting([simplest])] or [*fitting(alone)]
        if refusals and (plans or not alone):
            together = [one for one in others if one not in alone]
            slowest = min((one.moving_seconds for one in plans), default=math.inf)
            seconds = _SECONDS_PER_ROW_STEP * self._row_steps
            plans += fitting(one for one in together if one[0] * seconds < slowest)
        if not plans:
            raise min(refusals, key=lambda one: one.smallest or 0)
        if self.settings.certified:
            for one in dict.fromkeys(self.alone):
                one.certificate  # noqa: B018  several chunks compute what one by one do
        return min(plans, key=lambda one: one.cost)

    @property
    def _row_steps(self) -> int:
        """Operators of a chunk times rows of its result."""
        program = self.alone[-1].program
        return len(program.steps) * program.rows[program.output].size

    def _candidates(self) -> list[tuple[int, Placement]]:
        """Return numbers of chunks that run together and places of the state, simplest first."""
        device = self.alone[0].inputs.first.device
        places = allowed_placements(device, self.settings.pages)
        if self.together == "auto":
            most = max(1, min(_MOST_TOGETHER, _MOST_ROW_STEPS // self._row_steps))
            numbers = [1, self.count if self.count <= most + 1 else most]
            numbers = [*dict.fromkeys(numbers)]
        else:
            numbers = [min(self.together, self.count)]
        found = list[tuple[int, Placement]]()
        for number in numbers:
            if number >= self.count:
                found.append((number, places[0]))  # there is no state
                continue
            for place in places:
                # in memory, the state of groups is as large as that of single chunks
                if place != "memory" or number == numbers[0]:
                    found.append((number, place))
        return found

    def plan(self, together: int, placement: Placement) -> ClipPlan:
        """Return the plan for so many chunks together, with the state in this place.

        Raises:
            BudgetError: It does not fit; the message names the smallest budget that is enough.
        """
        sections = self._sections(together)
        runs, refusals = list[ChunkProgramRun](), list[BudgetError]()
        for section in sections:
            try:
                runs.append(self._run(section, placement))
            except BudgetError as refusal:
                refusals.append(refusal)
        if refusals:  # what the largest program needs is enough for all
            raise max(refusals, key=lambda one: one.smallest or 0)
        device = self.alone[0].inputs.first.device
        store = CarriedStateStore(placement, self.dim, device, self.settings.scratch)
        state = self.alone[-1].inputs.tensors[1:] if len(sections) > 1 else ()
        return ClipPlan(tuple(runs), store, sum(one.nbytes for one in state))

    def _sections(self, together: int) -> list[_Section]:
        """Return the runs of so many chunks together, in order."""
        if together >= self.count:
            return [_Section(0, self.count, 1, keep_state=False)]
        head = 1 + (self.count - 1) % together
        groups = (self.count - head) // together
        return [
            _Section(0, head, 1, keep_state=True),
            _Section(1, together, groups, keep_state=True),
        ]

    def _run(self, section: _Section, placement: Placement) -> ChunkProgramRun:
        """Return the run of a section; raises `BudgetError` as `plan` does."""
        planner = self._planner(section)
        held = CarriedStateBytes(section.chunks, placement, self.result_bytes)
        settings = replace(self.settings, certified=False, held=held)
        prepared = prepare_stream(planner.module, planner.inputs, settings, planner)
        return ChunkProgramRun(section.chunks, section.times, planner.module, prepared)

    def _planner(self, section: _Section) -> StreamPlanner:
        """Return the planner of a section's program, the same for all places of the state."""
        key = section.first, section.chunks, section.keep_state
        if key not in self._planners:
            self._planners[key] = self._new_planner(section)
        return self._planners[key]

    def _new_planner(self, section: _Section) -> StreamPlanner:
        kinds = [section.first, *([1] * (section.chunks - 1))]
        alone, keep_state = [self.alone[kind] for kind in kinds], section.keep_state
        module, inputs, program = self.modules[section.first], alone[0].inputs, alone[0].program
        if section.chunks > 1 or not keep_state:  # alone, a chunk makes a state that nothing reads
            program = unroll_chunks([one.program for one in alone], keep_state=keep_state)
            module = UnrolledChunks([self.modules[kind] for kind in kinds], keep_state=keep_state)
            tensors = *(one.inputs.first for one in alone), *inputs.tensors[1:]
            inputs = ModelInputs(tensors, dict.fromkeys(range(len(tensors)), self.dim))
        return StreamPlanner(
            module,
            inputs,
            pages=self.settings.pages,
            whole_image=False,
            program=program,
            profile=self.settings.profile,
        )
