"""Run of a planned clip: chunks in, results of chunks out, and the state between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from torch import Tensor

from lowtide.streaming.capture.graph import TensorMeta
from lowtide.streaming.clip_plan import ChunkRun, ClipPlan
from lowtide.streaming.engine.carried_state import CarriedState
from lowtide.streaming.pages.page import MemoryPage, Page

# Dims of frames and of rows in (B, C, T, H, W).
_FRAMES, _ROWS = 2, 3
# Called with the number of frames made since the last call.
AfterChunks = Callable[[int], object]
# Returns the next frames, so many of them.
ReadChunk = Callable[[int], Tensor]
WriteChunk = Callable[[Tensor], object]


class WholeResult:
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


class ChunkResults:
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


def run_clip(plan: ClipPlan, chunks: Iterator[Tensor], result: WholeResult | ChunkResults) -> None:
    """Write the results of the chunks (1, C, T, H, W) of one clip, run by run."""
    state = plan.store.empty([])
    for run in plan:
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
        except BaseException:
            new_state.close()
            raise
        state = new_state
    state.close()


def _write_rows(
    run: ChunkRun, pages: Sequence[Page], targets: Sequence[Tensor], state: CarriedState
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
