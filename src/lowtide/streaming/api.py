"""The public API of streaming: `stream` and the wrapper module `Streamed`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lowtide.core.errors import UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.budget import Budget, require_valid_budget
from lowtide.memory.library_memory import reason_not_to_plan
from lowtide.memory.tracing.fake import model_tensors
from lowtide.memory.tracing.python_places import global_hooks
from lowtide.streaming.batch_independence import require_independent_images
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.model_inputs import (
    ModelInputs,
    StreamAxis,
    require_module,
    require_plain_tensors,
    require_plain_weights,
)
from lowtide.streaming.certificate import tf32_is_allowed
from lowtide.streaming.engine.executor import allocate_result, collect_rows
from lowtide.streaming.engine.placement import PagePlacement, require_page_placement
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from lowtide.streaming.planner.program_cache import import_capture_libraries
from lowtide.streaming.prepared_stream import PreparedStream, StreamSettings, prepare_stream

# Image sizes whose programs are kept.
_MAX_PROGRAMS = 4


class Streamed(nn.Module):
    """Wrapper of a module that runs it in bands of rows within a memory budget.

    Takes the arguments of ``module``, by default an image ``(B, C, H, W)`` first, and returns what
    ``module`` returns for them, equal to rounding (accuracy class: exact): one tensor or several,
    alone or in a tuple, list, dictionary or dataclass. The tensor named by ``axis`` is streamed;
    every band takes the other arguments whole, such as a timestep ``(B,)`` or text ``(B, N, C)``.
    A number that changes from call to call is better passed as a tensor, since the program is
    captured anew for another number. The images of a batch run one after another, once the module
    is proven to treat them independently; a module that mixes them is refused. Beyond weights,
    input and result, memory holds the bands, the pages between segments and the workspaces of
    single operators; `explain` lists it. Along time, the bands of a causal convolution hold the
    frames that the next band needs, as its cache does elsewhere.

    The first image of a size takes seconds longer: the graph is captured and compared with the
    module itself on a small image. The outcome of that comparison is cached on disk. The program is
    captured again when the module has changed: its parameters, buffers, submodules, hooks, modes
    and dtypes, and attributes that are numbers, strings, arrays or containers of these. Weight
    values are read at each call. Not noticed is what ``forward`` reads elsewhere: global variables,
    closures, files, what is deep inside of other objects. After such a change, create another
    `Streamed`. Hooks of submodules may change the values that pass through, but are not called for
    each image. A module that remembers its calls, such as its last result, is refused.

    There is no backward pass: a call that needs gradients raises `UsageError`. Several threads may
    call it; calls run one at a time. A copy, by pickle or `copy`, prepares its own programs.

    Method: bands as in fused-layer networks (MCUNetV2, arXiv 2110.15352), with exact norms and
    attention windows.

    Raises:
        ModelError: The module cannot be streamed exactly.
        BudgetError: The budget is too small; the message names the smallest that is enough.

    Warns:
        UserWarning: On a CPU, the first call will take more than the budget: what planning it
            leaves, or the comparison on a small image; the message says how much.
    """

    # Attributes that a call may change: no change of a module that contains this one.
    _ignored_attributes = frozenset({"_prepared", "_lock", "_scratch", "_settings"})

    def __init__(
        self,
        module: nn.Module,
        *,
        budget: str | int | Budget = "auto",
        pages: PagePlacement = "auto",
        scratch: Path | None = None,
        certified: bool = True,
        axis: StreamAxis | None = None,
    ) -> None:
        super().__init__()
        require_module(module)
        require_page_placement(pages)
        require_valid_budget(budget)
        self.module, self._axis = module, axis
        self._scratch = ScratchSpace(scratch)
        self._settings = StreamSettings(budget, pages, self._scratch, certified)
        self._reset()

    @property
    def budget(self) -> str | int | Budget:
        """The memory limit, as it was given."""
        return self._settings.budget

    def _reset(self) -> None:
        self._prepared: OrderedDict[object, PreparedStream] = OrderedDict()
        self._lock = threading.RLock()
        # The libraries of captures are no part of a call's memory, so they are here before it.
        if reason_not_to_plan() is None:
            import_capture_libraries()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``module`` returns, after hooks of this wrapper."""
        if not any(global_hooks()):
            return super().__call__(*args, **kwargs)
        # Those of all modules are called for the module's own, in its program.
        if self._forward_hooks or self._forward_pre_hooks:
            raise UsageError(
                "a streamed module has hooks of its own, and there are hooks of all modules too",
                hint="put its own on the module that is streamed",
            )
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``module`` returns for these arguments."""
        if torch.compiler.is_compiling():
            eager: Any = torch.compiler.disable(self._run)
            return eager(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._bind(args, kwargs)
        with self._lock:
            known = self._prepare(inputs)
            pack = self._repack_for(known, inputs)
            samples = [_run_in_bands(known, sample) for sample in inputs.samples()]
        results = samples[0]
        if len(samples) > 1:
            results = [torch.cat(parts) for parts in zip(*samples, strict=True)]
        return pack([results[place] for place in known.output_places])

    def rows(self, *args: Any, **kwargs: Any) -> Iterator[tuple[int, Tensor]]:
        """Yield the result of one sample in bands of rows, in order.

        Yields ``(first row, rows)``, of an image (1, C, rows, W). For results that are never held
        as a whole.
        """
        inputs = self._bind(args, kwargs)
        if inputs.batch_size > 1:
            raise UsageError(f"rows() takes one image, not a batch of {inputs.batch_size}")
        known = self._prepare(inputs)
        if len(known.program.outputs) > 1:
            raise UsageError(f"rows() yields one result, not {len(known.program.outputs)}")
        yield from ((first, rows) for _, first, rows in known.run(inputs))

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Describe how inputs of these sizes run and what memory they take."""
        return self.prepare(*args, **kwargs).title

    def prepare(self, *args: Any, **kwargs: Any) -> PreparedStream:
        """Return the program for inputs like these, from the cache or newly captured.

        Captured once for each size, dtype and setting that changes what the module computes, and
        again when the module has changed.
        """
        return self._prepare(self._arguments(args, kwargs))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelInputs:
        inputs = ModelInputs.bind(self.module, args, kwargs, self._axis)
        require_plain_tensors(inputs.tensors)
        return inputs

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelInputs:
        inputs = self._arguments(args, kwargs)
        reject_gradients(self.module, inputs.tensors)
        return inputs.with_tensors([one.detach() for one in inputs.tensors])

    def _prepare(self, inputs: ModelInputs) -> PreparedStream:
        # The workspaces of convolutions depend on TF32 too.
        key = (
            inputs.key,
            tf32_is_allowed(),
            AutocastState.current(inputs.first.device.type),
            torch.get_default_dtype(),
        )
        with self._lock:
            fingerprint = ModuleFingerprint(self.module)
            for other in [
                one for one, known in self._prepared.items() if not known.matches(fingerprint)
            ]:
                del self._prepared[other]
            if key not in self._prepared:
                require_plain_weights(self.module)
                with TRACE_LOCK:
                    self._prepared[key] = prepare_stream(
                        self.module, inputs.sample(0), self._settings
                    )
                while len(self._prepared) > _MAX_PROGRAMS:
                    self._prepared.popitem(last=False)
            self._prepared.move_to_end(key)
            self._prepared[key].executor.refresh_constants()
            return self._prepared[key]

    def _repack_for(self, known: PreparedStream, inputs: ModelInputs) -> Any:
        """Return the function that packs tensors into the module's output container."""
        if inputs.batch_size == 1:
            return known.program.graph.repack
        shapes = tuple(one.shape for one in inputs.tensors)
        if shapes not in known.batch_repack:
            with TRACE_LOCK:
                known.batch_repack[shapes] = require_independent_images(self.module, inputs)
        return known.batch_repack[shapes]

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own weights; the programs hold those of this module.
        own = {"_prepared", "_lock"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def _replicate_for_data_parallel(self) -> Streamed:
        replica = super()._replicate_for_data_parallel()
        replica._reset()
        return replica


def reject_gradients(module: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Raise `UsageError` if a call with these tensors, of any shapes, needs gradients.

    Or tangents, of forward-mode differentiation.
    """
    if forward_ad._current_level >= 0:
        for one in (*tensors, *model_tensors(module)):
            if forward_ad.unpack_dual(one).tangent is not None:
                raise UsageError(
                    "a streamed module has no forward-mode derivative, and a tensor of this call"
                    " has a tangent",
                    hint="call the module itself, after lowtide.unfit(module) if it is fitted",
                )
    if not torch.is_grad_enabled():
        return
    names = (name for name, one in module.named_parameters() if one.requires_grad)
    given = any(one.requires_grad for one in tensors)
    what = "the input" if given else next(names, None)
    if what is not None:
        raise UsageError(
            f"a streamed module has no backward pass, and {what} requires gradients",
            hint="call it in torch.no_grad(); where gradients are needed, call the module"
            " itself, after lowtide.unfit(module) if it is fitted",
        )


def _run_in_bands(known: PreparedStream, inputs: ModelInputs) -> list[Tensor]:
    program, device = known.program, inputs.first.device
    if device.type == "cpu":
        return collect_rows(program, known.run(inputs))
    return collect_rows(program, known.run(inputs), allocate_result(program, device))


def stream(
    module: nn.Module,
    *,
    budget: str | int | Budget = "auto",
    pages: PagePlacement = "auto",
    scratch: Path | None = None,
    axis: StreamAxis | None = None,
) -> Streamed:
    """Wrap ``module`` to run in bands of rows within ``budget``: see `Streamed`.

    Examples::

        small = lowtide.stream(model.eval(), budget="1GiB")
        with torch.no_grad():
            result = small(image)        # equal to model(image) except for rounding

        video = lowtide.stream(decoder, axis=2)(latents)              # T of (B, C, T, H, W)
        noise = lowtide.stream(denoiser)(image, timestep, text=text)  # the image is streamed

    Args:
        module: The module to run.
        budget: Memory limit; ``"auto"`` derives it from what is free.
        pages: Where feature maps between segments are kept: in ``"memory"`` of the image's device,
            for a GPU in that of its ``"host"``, or on ``"disk"``. ``"auto"`` keeps as many in
            memory as fit and spills the others to the next of these places.
        scratch: Folder of the unnamed file of pages on disk, which is removed with the module;
            between calls up to 1 GiB of it is kept for the next call.
        axis: Dim of the first tensor along which it is streamed: 2 or 3 for H or W of
            ``(B, C, H, W)``, 2 for L of ``(B, C, L)``, 2, 3 or 4 for T, H or W of
            ``(B, C, T, H, W)``, 0 for frames as a batch ``(T, C, H, W)``. By default the first
            tensor is an image, streamed along its height. A dictionary such as ``{"image": 2,
            "mask": 2}`` names several streamed arguments, by parameter or position.
    """
    return Streamed(module, budget=budget, pages=pages, scratch=scratch, axis=axis)
