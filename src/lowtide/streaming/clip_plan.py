"""Plan of a clip's run, and the run itself: chunks in, results out, and the state between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from torch import Tensor, nn

from lowtide.core.units import MIB, format_bytes
from lowtide.streaming.capture.graph import TensorMeta
from lowtide.streaming.engine.clip_chunks import CarriedState, CarriedStateStore
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from lowtide.streaming.pages.page import FeaturePage, MemoryPage
from lowtide.streaming.prepared_stream import PreparedStream

_STATE_LABELS = {"memory": "in memory", "host": "on the host", "disk": "on disk"}
# Dims of frames and of rows in (B, C, T, H, W).
_FRAMES, _ROWS = 2, 3
# Called with the number of frames made since the last call.
AfterChunks = Callable[[int], object]
# Returns the next frames, so many of them.
ReadChunk = Callable[[int], Tensor]
WriteChunk = Callable[[Tensor], object]
# Called after each run with the number of runs that are done, and the state that they leave.
AfterRun = Callable[[int, CarriedState], object]


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
class ChunkProgramRun:
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

    runs: tuple[ChunkProgramRun, ...]
    store: CarriedStateStore
    state_bytes: int

    def __iter__(self) -> Iterator[ChunkProgramRun]:
        """Yield each run in order, as often as it is repeated."""
        for one in self.runs:
            for _ in range(one.times):
                yield one

    def matches(self) -> bool:
        """Return whether the modules are unchanged since the plan was made."""
        return all(one.prepared.matches(ModuleFingerprint(one.module)) for one in self.runs)

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
        """Return the most bytes of the state and of pages in this place, other than the device."""
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
class RunPart:
    """Some of the runs of a clip, as an earlier process left it.

    Attributes:
        first: Runs that are done.
        last: Number of the run before which this part ends; None for the end of the clip.
        state: What the run before the first one left, as `CarriedState.save` wrote it.
        after_run: Called after each run.
    """

    first: int = 0
    last: int | None = None
    state: BinaryIO | None = None
    after_run: AfterRun | None = None


class WholeClipResult:
    """Result of a clip as one tensor (1, C, T, H, W), of which each chunk makes frames."""

    def __init__(self, result: Tensor, after_chunks: AfterChunks | None) -> None:
        self._result, self._after_chunks, self._frame = result, after_chunks, 0

    def targets(self, metas: Sequence[TensorMeta]) -> list[Tensor]:
        """Return where the results of the next chunks belong."""
        frames = [meta.shape[_FRAMES] for meta in metas]
        first, self._frame = self._frame, self._frame + sum(frames)
        return [*self._result.narrow(_FRAMES, first, sum(frames)).split(frames, _FRAMES)]

    def finish(self, targets: list[Tensor]) -> None:
        """Say that these are made."""
        if self._after_chunks is not None:
            self._after_chunks(sum(one.shape[_FRAMES] for one in targets))


class ChunkResultWriter:
    """Results of chunks (1, C, T, H, W) that are freed as soon as they are written."""

    def __init__(self, like: Tensor, write: WriteChunk) -> None:
        self._like, self._write = like, write

    def targets(self, metas: Sequence[TensorMeta]) -> list[Tensor]:
        """Return tensors for the results of the next chunks."""
        return [self._like.new_empty(meta.shape, dtype=meta.dtype) for meta in metas]

    def finish(self, targets: list[Tensor]) -> None:
        """Hand the results over, one by one."""
        while targets:
            self._write(targets.pop(0))


def run_clip(
    plan: ClipPlan,
    chunks: Iterator[Tensor],
    result: WholeClipResult | ChunkResultWriter,
    part: RunPart | None = None,
) -> None:
    """Write the results of the chunks (1, C, T, H, W) of one clip, or of a part, run by run."""
    part = part or RunPart()
    runs, done = [*plan], part.first
    metas = runs[done - 1].results[runs[done - 1].chunks :] if done else []
    state = plan.store.load(metas, part.state) if part.state else plan.store.empty([])
    for run in runs[done : part.last]:
        try:
            taken = [
                MemoryPage.from_tensor(one.contiguous(), _ROWS)
                for one in islice(chunks, run.chunks)
            ]
            targets = result.targets(run.results[: run.chunks])
            new_state = plan.store.empty(run.results[run.chunks :])
        except BaseException:
            state.close()
            raise
        try:
            _write_rows(run, [*taken, *state.take_pages()], targets, new_state)
            result.finish(targets)
            done += 1
            if part.after_run is not None:
                part.after_run(done, new_state)
        except BaseException:
            new_state.close()
            raise
        state = new_state
    state.close()


def _write_rows(
    run: ChunkProgramRun,
    pages: Sequence[FeaturePage],
    targets: Sequence[Tensor],
    state: CarriedState,
) -> None:
    """Write the rows that a run makes to the frames of its chunks and to the new state."""
    places = run.prepared.output_places
    for output, first, rows in run.prepared.executor.run(pages):
        for number, place in enumerate(places):
            if place == output and number < run.chunks:
                targets[number].narrow(_ROWS, first, rows.shape[_ROWS]).copy_(rows)
            elif place == output:
                state.write(number - run.chunks, first, rows)
        del rows  # free the rows before the next band is computed
