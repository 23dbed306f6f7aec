"""Comparison of a streamed program with its model on small images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.core.heap import trim_heap
from lowtide.memory.plan_store import JsonCache, machine_facts
from lowtide.memory.tracing.python_place import AttributeKey
from lowtide.memory.tracing.python_places import PythonStatePlaces
from lowtide.streaming.capture.autocast_state import AutocastState, no_autocast
from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.capture.model_inputs import ModelInputs, memory_format_of
from lowtide.streaming.capture.outputs import (
    dtype_tolerance,
    error_words,
    largest_error,
    unpack_output,
)
from lowtide.streaming.capture.remembered import require_no_memory
from lowtide.streaming.engine.executor import BandExecutor, collect_rows
from lowtide.streaming.engine.placement import memory_page_factory
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.engine.segments import CutFinder, cut_segments
from lowtide.streaming.pages.page import input_pages
from lowtide.streaming.planning_memory import plan_kept_bytes, warn_beyond, whole_run_budget

# Small sides have the same remainder as the real ones, so that a model pads by the same amount. The
# larger sizes are for models with a special case at their training size, or that take none below.
# Volumes and clips have smaller sides.
_REST, _LEAST = ((64, 64, 256), (16, 16, 128)), ((64, 128, 256), (32, 64, 128))
# For models that upscale by more, these are sides of the result: an autoencoder's decoder, which
# upscales by 8, would run at its real size, in more time and memory than the run it is to prove.
_MAX_SCALE = 4, 1
# Allowed error of bands as a multiple of the model's own 16-bit error, where that error is large.
_ERROR_FACTOR = 2
_FP32_HINT = (
    "run it in fp32: module.float(); an autoencoder of diffusers by .to(torch.float32), and its"
    " pipeline converts what it decodes if vae.config.force_upcast is set"
)
_AXES_HINT = (
    "an argument of the image's size is streamed too: axis={'image': 2, 'mask': 2} names both"
)
# Copies of the largest weight in other layouts, beside the maps of a small image.
_WEIGHT_COPIES = 4
# Segments of the program and bands of each to try: two choices with little in common.
_TRIED = (1, 3), (6, 5)


@dataclass(frozen=True)
class StreamCertificate:
    """Measured error of a streamed program against its model.

    Attributes:
        error: Largest difference from the model itself, divided by its largest absolute value.
            Where 16-bit types leave more than rounding should, the error against the model in fp32.
        own_error: In that case, the model's own error against fp32.
        operators: Digest of the operators in order, which the program of the real size must share.
    """

    error: float
    operators: str
    own_error: float | None = None

    def holds(self, allowed: float) -> bool:
        """Return whether the error is within ``allowed``, the tolerance for rounding."""
        return self.error <= (allowed if self.own_error is None else _ERROR_FACTOR * self.own_error)


def certify(
    module: nn.Module,
    inputs: Tensor | ModelInputs,
    program: StreamProgram,
    budget_bytes: int | None = None,
    before_computing: Callable[[], None] = lambda: None,
) -> StreamCertificate:
    """Compare ``module`` run in bands with ``module`` itself, on small inputs.

    The outcome is kept in the plan store, by weights, remainders of the sizes, and machine.

    Args:
        module: The module to compare with.
        inputs: Arguments of the real size, or an image (B, C, H, W) alone; fixed tensors are used
            as they are.
        program: The program for the real size.
        budget_bytes: On a CPU, the budget: a comparison that takes more warns before.
        before_computing: Called unless the outcome is stored.

    Raises:
        ModelError: The two differ by more than rounding, or the model runs other operators at
            another size, or takes no small one.
    """
    refusal: ModelError | None = None
    wanted = program.operators_digest
    allowed = dtype_tolerance(node.meta.dtype for node in program.graph.nodes)
    inputs = ModelInputs.of(inputs)
    for small in (_small_inputs(inputs, program, which) for which in range(len(_LEAST[0]))):
        # What the last run left, of another size perhaps, does not change what the next computes.
        operators = f"{wanted} {program.constants_digest}"
        key = module_key(module, small, operators, program.graph.written_attributes)
        stored = JsonCache().get("proof", "bands", *key)
        if stored is not None:
            found = StreamCertificate(**stored)
        else:
            before_computing()
            # A small model, or the second size, may be of the real size.
            known = program if small.key == inputs.key else None
            with allow_tf32(False):
                try:
                    known = known or lower_to_rows(capture_graph(module, small))
                except ModelError as error:  # below its least size, or no multiple of its own
                    refusal = error
                    continue
                _announce(module, small, known, budget_bytes)
                found = _measure(module, small, allowed, known)
            refusal = None
            JsonCache().put("proof", "bands", *key, value=asdict(found))
        if not found.holds(allowed):
            _require_same_again(module, small, allowed)
            raise ModelError(
                f"bands of this model differ from the whole result {error_words(found.error)}",
                hint="run it whole or in tiles",
            )
        if found.operators == wanted:
            return found
    size = "×".join(str(inputs.first.shape[dim]) for dim in reversed(inputs.side_dims()))
    if refusal is not None:
        raise ModelError(
            f"bands of this model cannot be compared with itself at a size below {size}:"
            f" {refusal.message}",
            hint=_AXES_HINT if _is_of_its_size(inputs) else "run it whole or in tiles",
        )
    raise ModelError(
        f"at {size} this model runs other operators than at the smaller"
        " sizes at which its bands were compared"
    )


def _is_of_its_size(inputs: ModelInputs) -> bool:
    """Whether a tensor that is taken whole ends in the sides of the streamed one."""
    sides = inputs.first.shape[min(inputs.side_dims()) :]
    return any(one.shape[-len(sides) :] == sides for one in inputs.fixed)


def _small_inputs(inputs: ModelInputs, program: StreamProgram, which: int) -> ModelInputs:
    """Return random inputs of one of three small sizes, of which ``which`` 0 is the smallest."""
    shape, result = inputs.first.shape, program.graph.meta(program.output).shape
    axis, dims = program.rows[program.graph.inputs[0]], inputs.side_dims()
    large = len(dims) > 2
    sides = {}
    for dim in dims:
        scale = program.rows[program.output].size / axis.size
        if len(result) == len(shape):
            scale = result[dim] / shape[dim]
        share = 1 / scale if scale > _MAX_SCALE[large] else 1
        both = _REST[large][which], _LEAST[large][which]
        rest, least = (max(1, int(side * share)) for side in both)
        sides[dim] = min(shape[dim], least + shape[dim] % rest)
    return inputs.resized(sides)


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Context manager: allow or forbid TF32 in matrix products and convolutions.

    TF32 rounding depends on the kernel chosen for a size, and hides errors of bands.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = tf32_is_allowed()
    try:
        products.allow_tf32 = allowed
        convolutions.allow_tf32 = allowed  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        products.allow_tf32 = before[0]
        convolutions.allow_tf32 = before[1]  # pyright: ignore[reportAttributeAccessIssue]


def tf32_is_allowed() -> tuple[bool, bool]:
    """Return whether TF32 is allowed in (matrix products, convolutions)."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = convolutions.allow_tf32  # pyright: ignore[reportAttributeAccessIssue]
    return bool(products.allow_tf32), bool(allowed)


def _announce(
    module: nn.Module, small: ModelInputs, program: StreamProgram, budget_bytes: int | None
) -> None:
    """Warn if comparing small inputs takes more than the budget."""
    sides = "×".join(str(small.first.shape[dim]) for dim in reversed(small.side_dims()))
    needed = plan_kept_bytes(len(program.steps)) + _comparison_bytes(module, program)
    title = f"comparing bands of this {type(module).__name__} with itself at {sides}"
    warn_beyond(budget_bytes, needed, title)


def _comparison_bytes(module: nn.Module, program: StreamProgram) -> int:
    """Return about how many bytes the maps of a small image and copies of weights take."""
    weight = max((one.nbytes for one in module.parameters()), default=0)
    return whole_run_budget(program.graph) + _WEIGHT_COPIES * weight


def _measure(
    module: nn.Module, small: ModelInputs, allowed: float, known: StreamProgram | None = None
) -> StreamCertificate:
    """Run the program for small inputs, captured unless ``known``, and compare its results."""
    program = known or lower_to_rows(capture_graph(module, small))
    device, dtype = small.first.device, small.first.dtype
    # Each step leaves garbage and free blocks of other sizes, which would add up to the next's.
    trim_heap(collect=True)
    with PythonStatePlaces(module).kept() as changes, torch.inference_mode():
        whole = call_model(module, small)
    if not all(one.isfinite().all() for one in whole):
        raise ModelError(
            f"this model returns NaN or infinity for random input in {dtype}, so its bands"
            " cannot be compared",
            hint=None if dtype == torch.float32 else _FP32_HINT,
        )
    if not all(one.is_report for one in changes):
        require_no_memory(module, small, partial(call_model, module), whole, allowed)
    trim_heap()
    results: list[list[Tensor]] = []
    cutter = CutFinder(program)
    for parts, bands in _TRIED:
        segments = cut_segments(program, cutter.cuts(parts))
        pages = memory_page_factory(program, device)
        executor = BandExecutor(program, segments, [bands] * len(segments), pages)
        found = collect_rows(program, executor.run(input_pages(small), small.fixed))
        results.append([found[program.outputs.index(one)] for one in program.graph.outputs])
        del executor, pages, found
        trim_heap()
    error = max(largest_error(result, whole) for result in results)
    types = {dtype, *(node.meta.dtype for node in program.graph.nodes)}
    if error <= allowed or not types & {torch.bfloat16, torch.float16}:
        return StreamCertificate(error, program.operators_digest)
    exact = _in_fp32(module, small)
    error = max(largest_error(result, exact) for result in results)
    return StreamCertificate(error, program.operators_digest, largest_error(whole, exact))


def call_model(module: Callable[..., Any], inputs: ModelInputs) -> list[Tensor]:
    """Return the model's result tensors, of any shape, for copies of its inputs."""
    copies = [one.clone() for one in inputs.tensors]
    # in a copy of the context variables, which are put back so
    return unpack_output(copy_context().run(inputs.call, module, copies))[0]


def _require_same_again(module: nn.Module, small: ModelInputs, allowed: float) -> None:
    """Raise `ModelError` if two calls of the module as it is differ."""
    results = list[list[Tensor]]()
    for _ in range(2):
        with PythonStatePlaces(module).kept(), torch.inference_mode():
            results.append(call_model(module, small))
    if largest_error(*results) > allowed:
        raise ModelError(
            "this model returns something else each time for the same image, as one does that draws"
            " random numbers or reads a clock",
            hint="call the model itself",
        )


def _in_fp32(module: nn.Module, inputs: ModelInputs) -> list[Tensor]:
    """Return the model's results in fp32; needs a second set of weights."""
    weights = {
        name: tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    exact = inputs.with_tensors(
        [one.float() if one.is_floating_point() else one for one in inputs.tensors]
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, weights, args, kwargs)

    places = PythonStatePlaces(module)
    with places.kept(), torch.inference_mode(), no_autocast(inputs.first.device.type):
        return call_model(call, exact)


def module_key(
    module: nn.Module,
    inputs: ModelInputs,
    operators: str,
    ignored: Set[AttributeKey] = frozenset(),
) -> tuple[str, ...]:
    """Return what facts about a module are stored by: weights, code, inputs, machine.

    Its class, weights and ``operators`` do not determine what it computes and remembers: its code
    does, with the values that this can reach. Attributes that are ``ignored`` do not count.
    """
    digest = hashlib.sha256()
    facts = (
        type(module).__qualname__,
        repr(module),
        [(one.dtype, one.device.type, memory_format_of(one), one.shape) for one in inputs.tensors],
        inputs.axes,
        inputs.arguments,
        operators,
        PythonStatePlaces(module).digest(ignored),
        AutocastState.current(inputs.first.device.type),
        torch.get_default_dtype(),
    )
    digest.update(repr(facts).encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest(), *machine_facts(str(inputs.first.device))
