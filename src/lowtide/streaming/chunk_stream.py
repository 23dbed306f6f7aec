"""A clip in chunks of frames, each in bands of rows, with state carried from chunk to chunk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.errors import UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.budget import Budget
from lowtide.streaming.api import reject_gradients
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.certificate import tf32_is_allowed
from lowtide.streaming.clip_plan import ChunkRun, ChunksTogether, ClipPlan, ClipPlanner
from lowtide.streaming.engine.carried_state import CarriedState
from lowtide.streaming.engine.placement import PagePlacement
from lowtide.streaming.pages.page import MemoryPage, Page
from lowtide.streaming.prepared_stream import StreamSettings

# Dims of frames and of rows in (B, C, T, H, W).
_FRAMES, _ROWS = 2, 3


class ChunkStream:
    """Stream of a causal module over the frames of a clip (B, C, T, H, W), one chunk at a time.

    The caches of causal convolutions are inputs and results of the module: ``first(chunk)`` and
    ``later(chunk, *state)`` return ``(result, *state)``, with rows in dim 3 of every tensor. Frames
    that do not fill a later chunk are in the first one, which is longer then. All runs in bands of
    rows within the budget (accuracy class: exact). The images of a batch run one after another.

    Chunks run one by one, with the state of all rows in between, or several of them in each band,
    with the rows of the state that a band needs: see `lowtide.streaming.clip_plan`. Where neither
    the state nor that fits, the state is in host memory or on disk.

    Memory: the result of the clip, plus bands and state.

    Args:
        first: Module of the first chunk, (1, C, T, H, W).
        later: Module of each later chunk; its state has the shapes of the state it is given.
        frames: Input frames of the first chunk and of each later one.
        budget: As for `lowtide.stream`.
        pages: As for `lowtide.stream`, of maps within a chunk and of the state between chunks.
        scratch: As for `lowtide.stream`.
        together: Chunks that run together in each band, 1 or more; "auto" chooses.

    Raises:
        ModelError: One of the modules cannot be streamed exactly.
        BudgetError: The budget is too small; the message names the smallest that is enough.
        UsageError: For a call that needs gradients, or an input that is no clip.
    """

    def __init__(
        self,
        first: nn.Module,
        later: nn.Module,
        *,
        frames: tuple[int, int] = (1, 1),
        budget: str | int | Budget = "auto",
        pages: PagePlacement = "auto",
        scratch: Path | None = None,
        together: ChunksTogether = "auto",
    ) -> None:
        if together != "auto" and together < 1:
            raise UsageError(f"{together} chunks together: at least 1 runs, or 'auto'")
        self._modules = first, later
        self._frames = frames
        self._together: ChunksTogether = together
        self._pages: PagePlacement = pages
        self._budget, self._scratch = budget, ScratchSpace(scratch)
        self._lock = threading.RLock()
        # Key and plan of the last clip.
        self._prepared: tuple[object, ClipPlan] | None = None

    def __call__(self, clip: Tensor) -> Tensor:
        """Return the result (B, C', T', H', W') for a clip (B, C, T, H, W)."""
        if clip.dim() != 5 or 0 in clip.shape or not clip.is_floating_point():
            shape = "×".join(map(str, clip.shape))
            raise UsageError(
                "a clip is (batch, channels, frames, height, width) of floating point, not"
                f" {clip.dtype} {shape}"
            )
        for module in self._modules:
            reject_gradients(module, [clip])
        clip = clip.detach()
        with self._lock:
            plan, lengths = self.plan(clip), self._lengths(clip)
            result = _allocate_result(plan, clip)
            for sample, target in zip(clip.split(1), result.split(1), strict=True):
                _run_clip(plan, sample.split(lengths, _FRAMES), target)
        return result

    def explain(self, clip: Tensor) -> str:
        """Describe how the chunks of a clip (B, C, T, H, W) run and what memory they take."""
        return self.plan(clip).title

    def plan(self, clip: Tensor) -> ClipPlan:
        """Return the plan for a clip (B, C, T, H, W): order, state, and predicted bytes."""
        clip = clip.detach()
        with self._lock:
            key = (
                (tuple(clip.shape), clip.dtype, clip.device, tf32_is_allowed()),
                AutocastState.current(clip.device.type),
                torch.get_default_dtype(),
            )
            if self._prepared is not None:
                known, plan = self._prepared
                if known == key and plan.matches():
                    for one in plan.runs:
                        one.prepared.executor.refresh_constants()
                    return plan
            self._prepared = None  # free those of another size first
            with TRACE_LOCK, torch.no_grad():
                plan = self._planner(clip).choose()
            self._prepared = key, plan
            return plan

    def _lengths(self, clip: Tensor) -> list[int]:
        """Return the frames of each chunk of a clip."""
        first, later = self._frames
        more = max(0, clip.shape[_FRAMES] - first) // later
        return [clip.shape[_FRAMES] - more * later, *(more * [later])]

    def _planner(self, clip: Tensor) -> ClipPlanner:
        lengths, given = self._lengths(clip), list[ModelInputs]()
        made, state = _fake_results(self._modules, clip, lengths[:2]), list[Tensor]()
        for module, length, results in zip(self._modules, lengths, made, strict=False):
            # only shapes and dtypes of these count
            tensors = [clip.new_empty(_chunk_shape(clip, length)), *state]
            state = [clip.new_empty(one.shape, dtype=one.dtype) for one in results[1:]]
            rows: dict[int | str, int] = dict.fromkeys(range(len(tensors)), _ROWS)
            given.append(ModelInputs.bind(module, tuple(tensors), {}, rows))
        result_bytes = sum(
            one[0].nbytes * times for one, times in zip(made, (1, len(lengths) - 1), strict=False)
        )
        return ClipPlanner(
            self._modules,
            given,
            StreamSettings(
                self._budget, self._pages, self._scratch, recorded=False, certified=True
            ),
            count=len(lengths),
            result_bytes=len(clip) * result_bytes,
            dim=_ROWS,
            together=self._together,
        )


def _chunk_shape(clip: Tensor, length: int) -> tuple[int, ...]:
    return 1, clip.shape[1], length, *clip.shape[_ROWS:]


def _fake_results(
    modules: Sequence[nn.Module], clip: Tensor, lengths: Sequence[int]
) -> list[Sequence[Tensor]]:
    """Return the fake results of each module that a clip needs, for one sample."""
    found: list[Sequence[Tensor]] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module, length in zip(modules, lengths, strict=False):
            shape = _chunk_shape(clip, length)
            chunk = torch.empty(shape, dtype=clip.dtype, device=clip.device)
            found.append(module(chunk, *(found[-1][1:] if found else ())))
    return found


def _allocate_result(plan: ClipPlan, clip: Tensor) -> Tensor:
    metas = [meta for run in plan for meta in run.results[: run.chunks]]
    shape = list(metas[0].shape)
    shape[0], shape[_FRAMES] = len(clip), sum(meta.shape[_FRAMES] for meta in metas)
    return clip.new_empty(shape, dtype=metas[0].dtype)


def _run_clip(plan: ClipPlan, chunks: Sequence[Tensor], result: Tensor) -> None:
    """Write the result of the chunks (1, C, T, H, W) of one clip, run by run."""
    left, frame, state = iter(chunks), 0, plan.store.empty([])
    for run in plan:
        results = run.results
        taken = [
            MemoryPage.from_tensor(one.contiguous(), _ROWS) for one in islice(left, run.chunks)
        ]
        frames = [meta.shape[_FRAMES] for meta in results[: run.chunks]]
        targets = result.narrow(_FRAMES, frame, sum(frames)).split(frames, _FRAMES)
        new_state = plan.store.empty(results[run.chunks :])
        try:
            _write_rows(run, [*taken, *state.take_pages()], targets, new_state)
        except BaseException:
            new_state.close()
            raise
        frame, state = frame + sum(frames), new_state
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
