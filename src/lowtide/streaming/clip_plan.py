"""Choice of how the chunks of a clip run: how many together, and where their state is kept.

Two orders of the loops over frames and bands are two numbers of chunks that run together. One at a
time is *frames outside*: all bands of a chunk, then the next chunk, with the state of all rows in
between. All at once is *bands outside*: a band of all chunks, then the next band, with no more of
the state than the band reads. Clips too long for that run in groups, with the state of all rows
between groups alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from lowtide.streaming.prepared_stream import PreparedStream, StreamSettings, prepare_stream

# Chunks that run together at the most: a plan takes the longer, the more there are.
_MOST_TOGETHER = 8
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

    @property
    def cost(self) -> float:
        """Cost to compare plans by: overhead seconds, and memory priced in seconds."""
        model = self.runs[0].prepared.layout.cost_model
        speeds = {"memory": model.copy_bytes_per_second, **model.spill_bytes_per_second}
        overhead = sum(one.times * one.prepared.layout.overhead_seconds for one in self.runs)
        moving = self.moved_bytes / speeds[self.store.placement]
        return overhead + moving + self.peak_bytes / MIB * model.seconds_per_mib

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

    def choose(self) -> ClipPlan:
        """Return the plan within the budget: the simplest, or else that of least cost.

        Chunks one by one with the state in memory are the simplest: nothing is moved, and rows at
        the edges of bands are held for one chunk alone.

        Raises:
            BudgetError: No plan fits; the message names the smallest budget that is enough.
        """
        simplest, *others = self._candidates()
        plans, refusals = [], list[BudgetError]()
        for round_ in ([simplest], others):
            for together, placement in round_:
                try:
                    plans.append(self.plan(together, placement))
                except BudgetError as refusal:
                    refusals.append(refusal)
            if plans:
                return min(plans, key=lambda one: one.cost)
        raise min(refusals, key=lambda one: one.smallest or 0)

    def _candidates(self) -> list[tuple[int, Placement]]:
        """Return numbers of chunks that run together and places of the state, simplest first."""
        device = self.alone[0].inputs.first.device
        places = allowed_placements(device, self.settings.pages)
        if self.together == "auto":
            most = self.count if self.count <= _MOST_TOGETHER + 1 else _MOST_TOGETHER
            numbers = [1, most] if most > 1 else [1]
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
        head = self.count if together >= self.count else 1 + (self.count - 1) % together
        groups = (self.count - head) // together
        runs, refusals = list[ChunkRun](), list[BudgetError]()
        for first, chunks, times in ((0, head, 1), (1, together, groups)):
            if not times:
                continue
            try:
                runs.append(self._run(first, chunks, times, placement, keep_state=bool(groups)))
            except BudgetError as refusal:
                refusals.append(refusal)
        if refusals:  # what the larger program needs is enough for both
            raise max(refusals, key=lambda one: one.smallest or 0)
        device = self.alone[0].inputs.first.device
        store = StateStore(placement, self.dim, device, self.settings.scratch)
        state = self.alone[-1].inputs.tensors[1:] if groups else ()
        return ClipPlan(tuple(runs), store, sum(one.nbytes for one in state))

    def _run(
        self, first: int, chunks: int, times: int, placement: Placement, *, keep_state: bool
    ) -> ChunkRun:
        """Return the run of so many chunks that begin with the first or with a later one."""
        held = StateBytes(chunks, placement, self.result_bytes)
        kinds = [first, *([1] * (chunks - 1))]
        alone = [self.alone[kind] for kind in kinds]
        module, inputs, program = self.modules[first], alone[0].inputs, alone[0].program
        if chunks > 1 or not keep_state:  # alone, a chunk makes a state that nothing reads
            program = unroll([one.program for one in alone], keep_state=keep_state)
            module = UnrolledChunks([self.modules[kind] for kind in kinds], keep_state=keep_state)
            tensors = *(one.inputs.first for one in alone), *inputs.tensors[1:]
            inputs = ModelInputs(tensors, dict.fromkeys(range(len(tensors)), self.dim))
        settings = replace(self.settings, certified=False, held=held)
        prepared = prepare_stream(module, inputs, settings, program)
        for one in dict.fromkeys(alone):
            one.certificate  # noqa: B018  several compute what one by one do
        return ChunkRun(chunks, times, module, prepared)
