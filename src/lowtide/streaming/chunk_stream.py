"""A clip in chunks of frames, each in bands of rows, with state carried from chunk to chunk."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.errors import UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.budget import Budget, require_valid_budget
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.python_places import PythonStatePlaces
from lowtide.streaming.api import reject_gradients
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.graph import TensorMeta
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.certificate import tf32_is_allowed
from lowtide.streaming.clip_plan import (
    AfterChunks,
    ChunkResultWriter,
    ClipPlan,
    ReadChunk,
    RunPart,
    WholeClipResult,
    WriteChunk,
    run_clip,
)
from lowtide.streaming.clip_planner import ChunksTogether, ClipPlanner
from lowtide.streaming.engine.placement import PagePlacement, require_page_placement
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from lowtide.streaming.planner.stream_planner import StreamPlanner
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

    Memory: the result of the clip, plus bands and state; `run_chunks` holds only the results of
    the chunks that run.

    Args:
        first: Module of the first chunk, (1, C, T, H, W).
        later: Module of each later chunk; its state has the shapes of the state it is given.
        frames: Input frames of the first chunk and of each later one.
        budget: As for `lowtide.stream`.
        pages: As for `lowtide.stream`, of maps within a chunk and of the state between chunks.
        scratch: As for `lowtide.stream`.
        together: Chunks that run together in each band, 1 or more; "auto" chooses.
        profile: GPU to plan for, which need not be here: modules and clips may be on "meta", and
            nothing is run, not even to compare bands with the module.

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
        profile: DeviceProfile | None = None,
    ) -> None:
        if together != "auto" and together < 1:
            raise UsageError(f"{together} chunks together: at least 1 runs, or 'auto'")
        require_page_placement(pages)
        require_valid_budget(budget)
        self._modules = first, later
        self._frames = frames
        self._together: ChunksTogether = together
        self._pages: PagePlacement = pages
        self._budget, self._scratch = budget, ScratchSpace(scratch)
        self._profile = profile
        self._lock = threading.RLock()
        # Key and plan of the last clip.
        self._prepared: tuple[object, ClipPlan] | None = None
        # Of the first chunk and of later ones alone; clips of other lengths have the same.
        self._captured: dict[int, _CapturedChunk] = {}

    def __call__(self, clip: Tensor, after_chunks: AfterChunks | None = None) -> Tensor:
        """Return the result (B, C', T', H', W') for a clip (B, C, T, H, W).

        Args:
            clip: Frames.
            after_chunks: Called with the number of frames of the result that have been made since
                the last call. What it raises ends the run.
        """
        if clip.dim() != 5 or 0 in clip.shape or not clip.is_floating_point():
            shape = "×".join(map(str, clip.shape))
            raise UsageError(
                "a clip is (batch, channels, frames, height, width) of floating point, not"
                f" {clip.dtype} {shape}"
            )
        with self._lock:
            plan, lengths = self._checked_plan(clip), self.lengths(clip)
            clip = clip.detach()
            result = _allocate_result(plan, clip)
            for sample, target in zip(clip.split(1), result.split(1), strict=True):
                run_clip(
                    plan,
                    iter(sample.split(lengths, _FRAMES)),
                    WholeClipResult(target, after_chunks),
                )
        return result

    def run_chunks(
        self, like: Tensor, read: ReadChunk, write: WriteChunk, part: RunPart | None = None
    ) -> None:
        """Run a clip of which neither the frames nor the result are ever held whole.

        Args:
            like: Tensor of the clip's shape (1, C, T, H, W), dtype and device. Values are not read:
                an expanded scalar will do.
            read: Called with the number of frames of the next chunk; returns them, (1, C, frames,
                H, W).
            write: Called with the result of each chunk, (1, C', T', H', W'), in order. What it or
                ``read`` raises ends the run.
            part: Which runs of the plan; all of them by default. ``read`` begins with the first.
        """
        if len(like) != 1:
            raise UsageError(f"one clip runs chunk by chunk, not a batch of {len(like)}")
        with self._lock:
            plan = self._checked_plan(like, keep_result=False)
            lengths = self.lengths(like)
            if part is not None:
                done = sum(one.chunks for one in [*plan][: part.first])
                lengths = lengths[done:]
            run_clip(plan, map(read, lengths), ChunkResultWriter(like, write), part)

    def _checked_plan(self, clip: Tensor, *, keep_result: bool = True) -> ClipPlan:
        """Return the plan for a clip; raises `UsageError` for a call that cannot run."""
        if self._profile is not None:
            raise UsageError(f"this stream is only a plan for {self._profile.title}")
        for module in self._modules:
            reject_gradients(module, [clip])
        return self.plan(clip, keep_result=keep_result)

    def explain(self, clip: Tensor) -> str:
        """Describe how the chunks of a clip (B, C, T, H, W) run and what memory they take."""
        return self.plan(clip).title

    def plan(self, clip: Tensor, *, keep_result: bool = True) -> ClipPlan:
        """Return the plan for a clip (B, C, T, H, W): order, state, and predicted bytes.

        ``keep_result`` is whether the whole result is held, as by a call, or not, as by
        `run_chunks`.
        """
        clip = clip.detach()
        with self._lock:
            key = tuple(clip.shape), _run_state(clip), keep_result
            if self._prepared is not None:
                known, plan = self._prepared
                if known == key and plan.matches():
                    for one in plan.runs:
                        one.prepared.executor.refresh_constants()
                    return plan
            self._prepared = None  # free those of another size first
            with TRACE_LOCK, torch.no_grad():
                plan = self._planner(clip, keep_result=keep_result).choose()
            self._prepared = key, plan
            return plan

    def lengths(self, clip: Tensor) -> list[int]:
        """Return the frames of each chunk of a clip."""
        first, later = self._frames
        more = max(0, clip.shape[_FRAMES] - first) // later
        return [clip.shape[_FRAMES] - more * later, *(more * [later])]

    def _planner(self, clip: Tensor, *, keep_result: bool) -> ClipPlanner:
        lengths = self.lengths(clip)
        alone = self._planners_alone(clip, lengths[:2])
        results = [one.program.bytes_of(one.program.graph.outputs[0]) for one in alone]
        times = 1, len(lengths) - 1
        result_bytes = len(clip) * sum(map(operator.mul, results, times))
        return ClipPlanner(
            self._modules,
            alone,
            StreamSettings(
                self._budget,
                self._pages,
                self._scratch,
                certified=self._profile is None,
                profile=self._profile,
            ),
            count=len(lengths),
            result_bytes=result_bytes if keep_result else None,
            dim=_ROWS,
            together=self._together,
        )

    def _planners_alone(self, clip: Tensor, lengths: Sequence[int]) -> list[StreamPlanner]:
        """Return planners of the first chunk alone and, if there is any, of a later one."""
        found, state = list[StreamPlanner](), list[TensorMeta]()
        for which, (module, length) in enumerate(zip(self._modules, lengths, strict=False)):
            shape = 1, clip.shape[1], length, *clip.shape[_ROWS:]
            key = shape, state, _run_state(clip)
            known, fingerprint = self._captured.pop(which, None), ModuleFingerprint(module)
            if known is None or not known.matches(key, fingerprint):
                inputs = _fake_inputs(module, shape, state, clip)
                known = _CapturedChunk(key, fingerprint, StreamPlanner(module, inputs))
            self._captured[which] = known
            found.append(known.planner)
            graph = known.planner.program.graph
            state = [graph.meta(one) for one in graph.outputs[1:]]
        return found


@dataclass(frozen=True)
class _CapturedChunk:
    """Planner of a chunk alone, and what its program depends on."""

    key: object
    fingerprint: ModuleFingerprint
    planner: StreamPlanner

    def matches(self, key: object, fingerprint: ModuleFingerprint) -> bool:
        """Return whether the program is that of such a chunk and of the module as it is."""
        written = self.planner.program.graph.written_attributes
        return self.key == key and self.fingerprint.matches(fingerprint, written)


def _run_state(clip: Tensor) -> object:
    """Return what a captured program depends on besides the module and shapes."""
    return (
        (clip.dtype, clip.device, tf32_is_allowed()),
        AutocastState.current(clip.device.type),
        torch.get_default_dtype(),
    )


def _fake_inputs(
    module: nn.Module, shape: Sequence[int], state: Sequence[TensorMeta], clip: Tensor
) -> ModelInputs:
    """Return arguments without memory for one chunk of a clip.

    The module is called once, so that errors are those that it raises itself.
    """
    # What the module itself keeps of the call, such as the nesting of its state, is its own.
    kept, fake = (
        PythonStatePlaces([*module.children()]).kept(),
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    with kept, fake:
        chunk = torch.empty(shape, dtype=clip.dtype, device=clip.device)
        caches = [torch.empty(one.shape, dtype=one.dtype, device=clip.device) for one in state]
        module(chunk, *caches)
    rows: dict[int | str, int] = dict.fromkeys(range(1 + len(state)), _ROWS)
    return ModelInputs.bind(module, (chunk, *caches), {}, rows)


def _allocate_result(plan: ClipPlan, clip: Tensor) -> Tensor:
    metas = [meta for run in plan for meta in run.results[: run.chunks]]
    shape = list(metas[0].shape)
    shape[0], shape[_FRAMES] = len(clip), sum(meta.shape[_FRAMES] for meta in metas)
    return clip.new_empty(shape, dtype=metas[0].dtype)
