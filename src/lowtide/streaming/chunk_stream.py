"""A clip in chunks of frames, each in bands of rows, with state carried from chunk to chunk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.budget import Budget
from lowtide.streaming.api import reject_gradients
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.certificate import tf32_is_allowed
from lowtide.streaming.engine.carried_state import CarriedState, held_bytes
from lowtide.streaming.engine.placement import PagePlacement
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from lowtide.streaming.pages.page import MemoryPage
from lowtide.streaming.prepared_stream import PreparedStream, StreamSettings, prepare_stream

# Dims of frames and of rows in (B, C, T, H, W).
_FRAMES, _ROWS = 2, 3


class ChunkStream:
    """Stream of a causal module over the frames of a clip (B, C, T, H, W), one chunk at a time.

    The caches of causal convolutions are inputs and results of the module: ``first(chunk)`` and
    ``later(chunk, *state)`` return ``(result, *state)``, with rows in dim 3 of every tensor. Frames
    that do not fill a later chunk are in the first one, which is longer then. Each chunk runs in
    bands of rows within the budget (accuracy class: exact), and rows of the old state are freed as
    those of the new one are made. The images of a batch run one after another.

    Memory: result and state, plus the bands of one chunk as in `Streamed`.

    Args:
        first: Module of the first chunk, (1, C, T, H, W).
        later: Module of each later chunk; its state has the shapes of the state it is given.
        frames: Input frames of the first chunk and of each later one.
        budget: As for `lowtide.stream`.
        pages: As for `lowtide.stream`, of maps within a chunk. The state is kept on the device.
        scratch: As for `lowtide.stream`.

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
    ) -> None:
        self._modules = first, later
        self._frames = frames
        self._pages: PagePlacement = pages
        self._budget, self._scratch = budget, ScratchSpace(scratch)
        self._lock = threading.RLock()
        # Programs of the last size: of the first chunk, and of later ones if there were any.
        self._prepared: tuple[object, list[PreparedStream]] | None = None

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
            programs, lengths = self._programs(clip), self._lengths(clip)
            result = _allocate_result(programs, clip, lengths)
            for sample, target in zip(clip.split(1), result.split(1), strict=True):
                _run_clip(programs, sample.split(lengths, _FRAMES), target)
        return result

    def explain(self, clip: Tensor) -> str:
        """Describe how the chunks of a clip (B, C, T, H, W) run and what memory they take."""
        with self._lock:
            return "; ".join(one.title for one in self._programs(clip.detach()))

    def _programs(self, clip: Tensor) -> list[PreparedStream]:
        """Return the programs of the first chunk and, if there are any, of later ones."""
        key = (
            (tuple(clip.shape), clip.dtype, clip.device, tf32_is_allowed()),
            AutocastState.current(clip.device.type),
            torch.get_default_dtype(),
        )
        now = [ModuleFingerprint(module, addresses=False) for module in self._modules]
        if self._prepared is not None:
            known, programs = self._prepared
            # of a single chunk there is one program
            if known == key and all(map(PreparedStream.matches, programs, now)):
                for one in programs:
                    one.executor.refresh_constants()
                return programs
        self._prepared = None  # free those of another size first
        with TRACE_LOCK, torch.no_grad():
            programs = self._capture(clip)
        self._prepared = key, programs
        return programs

    def _lengths(self, clip: Tensor) -> list[int]:
        """Return the frames of each chunk of a clip."""
        first, later = self._frames
        more = max(0, clip.shape[_FRAMES] - first) // later
        return [clip.shape[_FRAMES] - more * later, *(more * [later])]

    def _capture(self, clip: Tensor) -> list[PreparedStream]:
        lengths, prepared = self._lengths(clip), []
        made, state = _fake_results(self._modules, clip, lengths[:2]), []
        refusals: list[BudgetError] = []
        result_bytes = len(clip) * sum(
            one[0].nbytes * times for one, times in zip(made, (1, len(lengths) - 1), strict=False)
        )
        for module, length, results in zip(self._modules, lengths, made, strict=False):
            # only shapes and dtypes of these count
            given = [clip.new_empty(_chunk_shape(clip, length)), *state]
            state = [clip.new_empty(one.shape, dtype=one.dtype) for one in results[1:]]
            held = partial(
                held_bytes,
                state_bytes=sum(one.nbytes for one in state),
                result_bytes=result_bytes,
            )
            settings = StreamSettings(
                self._budget, self._pages, self._scratch, recorded=False, certified=True, held=held
            )
            rows: dict[int | str, int] = dict.fromkeys(range(len(given)), _ROWS)
            inputs = ModelInputs.bind(module, tuple(given), {}, rows)
            try:
                prepared.append(prepare_stream(module, inputs, settings))
            except BudgetError as refusal:
                refusals.append(refusal)
        if refusals:  # what the largest chunk needs is enough for all
            raise max(refusals, key=lambda one: one.smallest or 0)
        return prepared


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


def _allocate_result(
    programs: Sequence[PreparedStream], clip: Tensor, lengths: Sequence[int]
) -> Tensor:
    metas = [one.program.graph.meta(one.program.graph.outputs[0]) for one in programs]
    shape = list(metas[0].shape)
    shape[0] = len(clip)
    shape[_FRAMES] += metas[-1].shape[_FRAMES] * (len(lengths) - 1)
    return clip.new_empty(shape, dtype=metas[0].dtype)


def _run_clip(programs: Sequence[PreparedStream], chunks: Sequence[Tensor], result: Tensor) -> None:
    """Write the result of the chunks (1, C, T, H, W) of one clip."""
    state, frame = CarriedState([]), 0
    for number, chunk in enumerate(chunks):
        known = programs[min(number, 1)]
        program, places = known.program, known.output_places
        pages = [MemoryPage.from_tensor(chunk.contiguous(), _ROWS), *state.pages]
        frames = program.graph.meta(program.outputs[places[0]]).shape[_FRAMES]
        target = result.narrow(_FRAMES, frame, frames)
        state = CarriedState.empty(len(places) - 1, _ROWS, chunk.device)
        for output, first, rows in known.executor.run(pages):
            if output == places[0]:
                target.narrow(_ROWS, first, rows.shape[_ROWS]).copy_(rows)
            for at, place in enumerate(places[1:]):
                if place == output:
                    state.write(at, first, rows)
            del rows  # free the rows before the next band is computed
        frame += frames
