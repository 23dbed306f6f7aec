"""Choice of how the chunks of a clip run: how many together, and where their state is kept.

Two orders of the loops over frames and bands are two numbers of chunks that run together. One at a
time is *frames outside*: all bands of a chunk, then the next chunk, with the state of all rows in
between. All at once is *bands outside*: a band of all chunks, then the next band, with no more of
the state than the band reads. Clips too long for that run in groups, with the state of all rows
between groups alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from lowtide.core.errors import BudgetError
from lowtide.core.units import MIB, format_bytes
from lowtide.streaming.capture.graph import TensorMeta
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.engine.carried_state import StateBytes, StateStore
from lowtide.streaming.engine.placement import Placement, allowed_placements
from lowtide.streaming.engine.unroll import unroll
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from lowtide.streaming.planner.stream_planner import StreamPlanner
from lowtide.streaming.prepared_stream import (
    PreparedStream,
    StreamSettings,
    available_bytes,
    prepare_stream,
)

# Chunks that run together at the most. A plan takes the longer, the more operators there are and
# the more rows to make bands of: so many of their product at the most, and so many seconds for each
# (measured: 0.8e-4 to 3e-4, with decoders of 300 to 400 operators a chunk).
_MOST_TOGETHER, _MOST_ROW_STEPS, _SECONDS_PER_ROW_STEP = 8, 300_000, 2e-4
# Drafts of two programs that differ by more than this are in the order of their exact bytes.
_CERTAINLY_LESS = 0.75
_STATE_LABELS = {"memory": "in memory", "host": "on the host", "disk": "on disk"}
ChunksTogether = int | Literal["auto"]


class UnrolledChunks(nn.Module):
    """Several chunks in one call, each with the state of the one before.

    Args:
        modules: Module of each chunk; the first may take a state too.
        keep_state: Whether the last state is returned.
    """

    def __init__(self, modules: Sequence[nn.Module], *, keep_state: bool) -> None:
        super().__init__()
        self.chunks, self.keep_state = nn.ModuleList(modules), keep_state

    def forward(self, *chunks_and_state: Tensor) -> tuple[Tensor, ...]:
        """Return the results of all chunks, (1, C, T, H, W), and the last state."""
        count = len(self.chunks)
        results, state = list[Tensor](), chunks_and_state[count:]
        for module, chunk in zip(self.chunks, chunks_and_state[:count], strict=True):
            result, *state = module(chunk, *state)
            results.append(result)
        return (*results, *(state if self.keep_state else ()))


@dataclass(frozen=True)
class ChunkRun:
    """A program that runs ``chunks`` chunks, ``times`` times after one another.

    ``module`` computes the same: a module of one chunk, or `UnrolledChunks`.
    """

    chunks: int
    times: int
    module: nn.Module
    prepared: PreparedStream

    @property
    def results(self) -> list[TensorMeta]:
        """Shape and dtype of the result of each chunk, (1, C, T, H, W), and of the new state."""
        graph = self.prepared.program.graph
        return [graph.meta(one) for one in graph.outputs]


@dataclass(frozen=True)
class ClipPlan:
    """How the chunks of a clip run.

    Attributes:
        runs: The run of the first chunks, and those of the others in groups, if there are any.
        store: Where the state is between runs.
        state_bytes: Bytes of the state between two runs.
    """

    runs: tuple[ChunkRun, ...]
    store: StateStore
    state_bytes: int

    def __iter__(self) -> Iterator[ChunkRun]:
        """Yield each run in order, as often as it is repeated."""
        for one in self.runs:
            for _ in range(one.times):
                yield one

    def matches(self) -> bool:
        """Return whether the modules are unchanged since the plan was made."""
        return all(
            one.prepared.matches(ModuleFingerprint(one.module, addresses=False))
            for one in self.runs
        )

    @property
    def peak_bytes(self) -> int:
        """Predicted peak on the device, with the result as far as it is held."""
        return max(one.prepared.layout.peak_bytes for one in self.runs)

    @property
    def upper_bytes(self) -> int:
        """Smallest budget in which it runs like this."""
        return max(one.prepared.upper_bytes for one in self.runs)

    @property
    def moved_bytes(self) -> int:
        """Bytes of the state that are written and read between runs."""
        return 2 * self.state_bytes * (sum(one.times for one in self.runs) - 1)

    def bytes_in(self, place: Placement) -> int:
        """Return the most bytes of the state and of pages in this place, the device apart."""
        layouts = [one.prepared.layout for one in self.runs]
        pages = [
            max(one.spilled_peak_bytes, one.disk_peak_bytes)
            for one in layouts
            if one.placement == place
        ]
        # the next state is made while the last is read
        state = 2 * self.state_bytes if self.store.placement == place else 0
        return state + max(pages, default=0)

    @property
    def transferred_bytes(self) -> int:
        """Bytes of state and pages that go to the host or to disk and come back, in all."""
        state = self.moved_bytes if self.store.placement != "memory" else 0
        layouts = [(one.times, one.prepared.layout) for one in self.runs]
        return state + sum(
            2 * times * one.spilled_bytes for times, one in layouts if one.placement != "memory"
        )

    @property
    def moving_seconds(self) -> float:
        """Estimated seconds in which the state is moved between runs."""
        model = self.runs[0].prepared.layout.cost_model
        speeds = {"memory": model.copy_bytes_per_second, **model.spill_bytes_per_second}
        return self.moved_bytes / speeds[self.store.placement]

    @property
    def overhead_seconds(self) -> float:
        """Estimated seconds in addition to the operators' own time."""
        bands = sum(one.times * one.prepared.layout.overhead_seconds for one in self.runs)
        return bands + self.moving_seconds

    @property
    def cost(self) -> float:
        """Cost to compare plans by: overhead seconds, and memory priced in seconds."""
        model = self.runs[0].prepared.layout.cost_model
        return self.overhead_seconds + self.peak_bytes / MIB * model.seconds_per_mib

    @property
    def title(self) -> str:
        """Description for the user: order, state, and how each program runs."""
        count = sum(one.times * one.chunks for one in self.runs)
        if len(self.runs) == 1:
            how = "all in each band" if count > 1 else "alone"
        else:
            together = self.runs[-1].chunks
            how = "one by one" if together == 1 else f"{together} in each band"
            how += f", state of {format_bytes(self.state_bytes)}"
            how += f" {_STATE_LABELS[self.store.placement]}"
            if self.store.placement != "memory":
                how += f" ({format_bytes(self.moved_bytes)} moved)"
        programs = "; ".join(one.prepared.title for one in self.runs)
        return f"chunks: {count}, {how}; {programs}"


@dataclass(frozen=True)
class _Part:
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
        smallest = alone[-1] if alone else None
        refusals = list[BudgetError]()

        def fitting(candidates: Iterable[tuple[int, Placement]]) -> Iterator[ClipPlan]:
            for one in candidates:
                try:
                    yield self.plan(*one)
                except BudgetError as refusal:
                    if one == smallest:
                        raise
                    refusals.append(refusal)

        hopeful = smallest is None or self._may_fit(*simplest)
        plans = list(fitting([simplest] if hopeful else []))
        if not plans:
            plans += fitting(reversed(alone))
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

    def _may_fit(self, together: int, placement: Placement) -> bool:
        """Return whether what is held in any layout leaves room for bands."""
        last = self._parts(together)[-1]
        planner = self._planner(last)
        held = self._held(last, placement).least_bytes(planner.program)
        settings, device = self.settings, planner.inputs.first.device
        return held < available_bytes(settings.budget, device, settings.profile)

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
        parts = self._parts(together)
        runs, refusals = dict[_Part, ChunkRun](), list[tuple[_Part, BudgetError]]()
        for part in sorted(parts, key=self._all_bytes, reverse=True):
            if refusals and self._needs_less(part, refusals[0][0], placement):
                continue
            try:
                runs[part] = self._run(part, placement)
            except BudgetError as refusal:
                refusals.append((part, refusal))
        if refusals:  # what the largest program needs is enough for all
            raise max((one for _, one in refusals), key=lambda one: one.smallest or 0)
        device = self.alone[0].inputs.first.device
        store = StateStore(placement, self.dim, device, self.settings.scratch)
        state = self.alone[-1].inputs.tensors[1:] if len(parts) > 1 else ()
        return ClipPlan(
            tuple(runs[part] for part in parts), store, sum(one.nbytes for one in state)
        )

    def _parts(self, together: int) -> list[_Part]:
        """Return the runs of so many chunks together, in order."""
        if together >= self.count:
            return [_Part(0, self.count, 1, keep_state=False)]
        head = 1 + (self.count - 1) % together
        groups = (self.count - head) // together
        return [
            _Part(0, head, 1, keep_state=True),
            _Part(1, together, groups, keep_state=True),
        ]

    def _all_bytes(self, part: _Part) -> int:
        """Return the bytes of all results in the program of a part."""
        program = self._planner(part).program
        return sum(map(program.bytes_of, program.rows))

    def _needs_less(self, part: _Part, other: _Part, placement: Placement) -> bool:
        """Return whether a part certainly fits where another does, by their smallest drafts."""
        drafts = [
            self._planner(one).with_held(self._held(one, placement)).least_draft_bytes
            for one in (part, other)
        ]
        return drafts[0] <= _CERTAINLY_LESS * drafts[1]

    def _held(self, part: _Part, placement: Placement) -> StateBytes:
        return StateBytes(part.chunks, placement, self.result_bytes)

    def _run(self, part: _Part, placement: Placement) -> ChunkRun:
        """Return the run of a part; raises `BudgetError` as `plan` does."""
        planner = self._planner(part)
        settings = replace(self.settings, certified=False, held=self._held(part, placement))
        prepared = prepare_stream(planner.module, planner.inputs, settings, planner)
        return ChunkRun(part.chunks, part.times, planner.module, prepared)

    def _planner(self, part: _Part) -> StreamPlanner:
        """Return the planner of a part's program, the same for all places of the state."""
        key = part.first, part.chunks, part.keep_state
        if key not in self._planners:
            self._planners[key] = self._new_planner(part)
        return self._planners[key]

    def _new_planner(self, part: _Part) -> StreamPlanner:
        kinds = [part.first, *([1] * (part.chunks - 1))]
        alone, keep_state = [self.alone[kind] for kind in kinds], part.keep_state
        module, inputs, program = self.modules[part.first], alone[0].inputs, alone[0].program
        if part.chunks > 1 or not keep_state:  # alone, a chunk makes a state that nothing reads
            program = unroll([one.program for one in alone], keep_state=keep_state)
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
