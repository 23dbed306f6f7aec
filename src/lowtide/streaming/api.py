"""The public API of streaming: `stream` and the wrapper module `Streamed`."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.budget import Budget
from lowtide.memory.cache import cache_folder
from lowtide.streaming.batch_independence import require_independent_images
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.certificate import memory_format_of, tf32_is_allowed
from lowtide.streaming.engine.arena import hold_arena
from lowtide.streaming.engine.executor import allocate_result, collect_rows
from lowtide.streaming.engine.placement import PagePlacement, Placement
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from lowtide.streaming.pages.page import MemoryPage
from lowtide.streaming.prepared_stream import PreparedStream, StreamSettings, prepare_stream
from lowtide.streaming.specialize.graph_replay import HINT, GraphReplays

# Image sizes whose programs are kept.
_MAX_PROGRAMS = 4


class Streamed(nn.Module):
    """Wrapper of a module that runs it in bands of rows within a memory budget.

    Takes ``(B, C, H, W)`` and returns what ``module`` returns for it, equal to rounding (accuracy
    class: exact). If ``module`` returns one tensor in a tuple, list, dictionary or dataclass, so
    does this. The images of a batch run one after another, once the module is proven to treat them
    independently; a module that mixes them is refused. Beyond weights, input and result, memory
    holds the bands, the pages between segments and the workspaces of single operators; `explain`
    lists it.

    The first image of a size takes seconds longer: the graph is captured and compared with the
    module itself on a small image. The outcome of that comparison is cached on disk. The program is
    captured again when the module has changed: its parameters, buffers, submodules, hooks, modes
    and dtypes, and attributes that are numbers, strings or containers of these. Weight values are
    read at each call. Not noticed is what ``forward`` reads elsewhere: global variables, closures,
    files, attributes of other objects. After such a change, create another `Streamed`. Hooks of
    submodules may change the values that pass through, but are not called for each image.

    ``recorded`` captures the run as a CUDA graph at the second image of a size and replays it from
    then on. The values are the same; a light model, whose kernels end before Python launches the
    next, gets faster. The memory of the run and a copy of the image stay allocated until an image
    of another size comes or the module is freed; pages stay on the GPU.

    There is no backward pass: a call that needs gradients raises `UsageError`. Several threads may
    call it; calls run one at a time. A copy, by pickle or `copy`, prepares its own programs.

    Method: bands as in fused-layer networks (MCUNetV2, arXiv 2110.15352), with exact norms and
    attention windows.

    Raises:
        ModelError: The module cannot be streamed exactly.
        BudgetError: The budget is too small; the message names the smallest that is enough.
    """

    # Attributes that a call may change: no change of a module that contains this one.
    _ignored_attributes = frozenset({"_known", "_replays", "_lock", "_scratch", "_wishes"})

    def __init__(
        self,
        module: nn.Module,
        *,
        budget: str | int | Budget = "auto",
        pages: PagePlacement = "auto",
        scratch: Path | None = None,
        recorded: bool = False,
        certified: bool = True,
    ) -> None:
        super().__init__()
        if pages not in get_args(Placement) and pages != "auto":
            raise UsageError(
                f"pages {pages!r} is not known", hint=f"auto, {', '.join(get_args(Placement))}"
            )
        if recorded and pages not in ("auto", "memory"):
            raise UsageError(
                f"a run recorded as a CUDA graph cannot keep its pages on {pages}", hint=HINT
            )
        self.module = module
        self._scratch = ScratchSpace(scratch)
        self._settings = StreamSettings(
            budget, "memory" if recorded else pages, self._scratch, recorded, certified
        )
        self._reset()

    def _reset(self) -> None:
        self._replays = GraphReplays() if self._settings.recorded else None
        self._prepared: OrderedDict[object, PreparedStream] = OrderedDict()
        self._lock = threading.RLock()

    def forward(self, image: Tensor) -> Any:
        """Return the result for images ``(B, C, H, W)``, as ``module`` returns it."""
        if torch.compiler.is_compiling():
            eager: Any = torch.compiler.disable(self._run)
            return eager(image)
        return self._run(image)

    def _run(self, image: Tensor) -> Any:
        _check(image)
        self._reject_gradients(image)
        image = image.detach()
        with self._lock:
            known = self.prepare(image)
            pack = self._repack_for(known, image)
            results = [self._run_single(known, single) for single in image.split(1)]
        return pack(results[0] if len(results) == 1 else torch.cat(results))

    def rows(self, image: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the result of one image in bands of rows, from the top down.

        Yields ``(first row, (1, C, rows, W))``. For results that are never held as a whole.
        """
        _check(image)
        self._reject_gradients(image)
        if len(image) > 1:
            raise UsageError(f"rows() takes one image, not a batch of {len(image)}")
        yield from _rows(self.prepare(image), image.detach())

    def explain(self, image: Tensor) -> str:
        """Describe how an image of this size runs and what memory it takes."""
        _check(image)
        more = "" if self._replays is None else "; recorded as a CUDA graph at the second image"
        return self.prepare(image).title + more

    def prepare(self, image: Tensor) -> PreparedStream:
        """Return the program for images like this one, from the cache or newly captured.

        Captured once for each size, dtype and setting that changes what the module computes, and
        again when the module has changed.
        """
        # The workspaces of convolutions depend on TF32 too.
        key = (
            *image.shape[1:],
            image.dtype,
            image.device,
            memory_format_of(image),
            tf32_is_allowed(),
            AutocastState.current(image.device.type),
            torch.get_default_dtype(),
        )
        with self._lock:
            fingerprint = ModuleFingerprint(self.module, addresses=self._settings.recorded)
            for other in [
                one for one, known in self._prepared.items() if not known.matches(fingerprint)
            ]:
                del self._prepared[other]
            if key not in self._prepared:
                with TRACE_LOCK:
                    self._prepared[key] = prepare_stream(
                        self.module, image.detach()[:1], self._settings
                    )
                while len(self._prepared) > _MAX_PROGRAMS:
                    self._prepared.popitem(last=False)
            self._prepared.move_to_end(key)
            self._prepared[key].executor.refresh_constants()
            return self._prepared[key]

    def _repack_for(self, known: PreparedStream, images: Tensor) -> Any:
        """Return what turns a tensor into the module's output container, for this batch."""
        if len(images) == 1:
            return known.program.graph.repack
        if len(images) not in known.batch_repack:
            with TRACE_LOCK:
                known.batch_repack[len(images)] = require_independent_images(
                    self.module, images, cache_folder()
                )
        return known.batch_repack[len(images)]

    def _reject_gradients(self, image: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        names = (name for name, one in self.module.named_parameters() if one.requires_grad)
        what = "the input" if image.requires_grad else next(names, None)
        if what is not None:
            raise UsageError(
                f"a streamed module has no backward pass, and {what} requires gradients",
                hint="call it in torch.no_grad(); where gradients are needed, call the module"
                " itself, after lowtide.unfit(module) if it is fitted",
            )

    def _run_single(self, known: PreparedStream, image: Tensor) -> Tensor:
        if self._replays is None:
            return _run_in_bands(known, image)
        run = functools.partial(_run_in_bands, known)
        return self._replays(run, image, known.executor.refresh_constants())

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own weights; the programs hold those of this module.
        own = {"_known", "_replays", "_lock"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def _replicate_for_data_parallel(self) -> Streamed:
        replica = super()._replicate_for_data_parallel()
        replica._reset()
        return replica


def _run_in_bands(known: PreparedStream, image: Tensor) -> Tensor:
    program, device = known.program, image.device
    if device.type == "cpu":
        return collect_rows(program, _rows(known, image))
    aside = hold_arena(known.executor.arena_bytes, device, program.bytes_of(program.output))
    result = allocate_result(program, device)
    del aside  # free it before the run is captured: what is captured must not include it
    return collect_rows(program, _rows(known, image), result)


def _rows(known: PreparedStream, image: Tensor) -> Iterator[tuple[int, Tensor]]:
    yield from known.executor.run(MemoryPage.from_tensor(image, 2))


def stream(
    module: nn.Module,
    *,
    budget: str | int | Budget = "auto",
    pages: PagePlacement = "auto",
    scratch: Path | None = None,
    recorded: bool = False,
) -> Streamed:
    """Wrap ``module`` to run in bands of rows within ``budget``: see `Streamed`.

        small = lowtide.stream(model.eval(), budget="1GiB")
        with torch.no_grad():
            result = small(image)        # equal to model(image) except for rounding

    Args:
        module: The module to run, which takes ``(B, C, H, W)``.
        budget: Memory limit; ``"auto"`` derives it from what is free.
        pages: Where feature maps between segments are kept: in ``"memory"`` of the image's device,
            for a GPU in that of its ``"host"``, or on ``"disk"``. ``"auto"`` keeps as many in
            memory as fit and spills the others to the next of these places.
        scratch: Folder of the unnamed file of pages on disk, which is removed with the module;
            between calls up to 1 GiB of it is kept for the next call.
        recorded: Replay the run as a CUDA graph, for many images of one size on a GPU.
    """
    return Streamed(module, budget=budget, pages=pages, scratch=scratch, recorded=recorded)


def _check(image: Tensor) -> None:
    if image.dim() != 4 or 0 in image.shape:
        shape = "×".join(map(str, image.shape)) or "()"
        raise UsageError(f"streaming takes (batch, channels, height, width), not {shape}")
    if not image.is_floating_point():
        raise UsageError(f"streaming takes floating-point images, not {image.dtype}")
