"""Search for submodules that cannot be captured, and the operators in their place."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor, nn

from lowtide.attention.spatial.local_window import RowRegionModule
from lowtide.core.errors import ModelError
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.tracing.python_places import MODULE_ATTRIBUTES
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.capture_errors import first_line
from lowtide.streaming.capture.model_inputs import ModelInputs, side_dims
from lowtide.streaming.capture.opaque_module import OpaqueModuleOp, RowRegionOp
from lowtide.streaming.capture.outputs import dtype_tolerance
from lowtide.streaming.spans import Span

# Rows of trial inputs, tried until the receptive field ends within one, and the sides of the other
# dims, smaller in volumes and clips; the remainder of the real sizes is added.
_SIZES, _OTHER_SIZES = (64, 128, 256), (64, 16)
_GRAINS = (1, 2, 4, 8, 16, 32, 64)
# Values that replace a row to see what depends on it; large ones cross thresholds too.
_REPLACEMENTS = (float("nan"), 3e4, -3e4, 0.5)


def probe_halo(name: str, module: nn.Module, example: Tensor, axis: int = 2) -> OpaqueModuleOp:
    """Measure the halo, scale and grain of a module that cannot be captured.

    Single rows of small random inputs are replaced by NaN and large values, to see which rows of
    the result change. Then bands are compared with the whole result.

    Args:
        name: Path of the module, for messages.
        module: Module that takes one tensor.
        example: Input in the model: trial inputs have its channels, dtype, device, and the
            remainder of its sides.
        axis: Dim of the rows.

    Raises:
        ModelError: Rows of the result depend on rows far away, or the module draws random numbers,
            cannot run on small inputs, or has no fixed scale.
    """
    trial = _Trial(name, module, example, axis)
    sizes = trial.sizes()
    autocast = AutocastState.current(example.device.type)
    halo = trial.halo(Fraction(sizes[axis]))
    for grain in (grain for grain in _GRAINS if grain % Fraction(sizes[axis]).denominator == 0):
        block = OpaqueModuleOp(
            name, module, axis, sizes, halo, grain, trial.workspace_per_element, autocast
        )
        if trial.bands_match(block):
            return block
    raise ModelError(f"{name} computes other rows in bands than on the whole image")


class _Trial:
    """Trial runs of one module on small inputs."""

    def __init__(self, name: str, module: nn.Module, example: Tensor, axis: int) -> None:
        self._name, self._module, self._example, self._axis = name, module, example, axis
        self._sides = side_dims(example.dim(), axis)
        self.workspace_per_element = 0.0
        if example.device.type == "cpu":
            image = self._image(_SIZES[0])
            self.workspace_per_element = live_peak_bytes(lambda: self._run(image)) / image.numel()

    def _image(self, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(size)
        shape, other = list(self._example.shape), _OTHER_SIZES[len(self._sides) > 2]
        for dim in self._sides:
            rest = _SIZES[0] if dim == self._axis else other
            shape[dim] = (size if dim == self._axis else other) + shape[dim] % rest
        if self._axis:
            shape[0] = 1
        image = torch.rand(shape, generator=generator)
        return image.to(self._example.device, self._example.dtype)

    @torch.inference_mode()
    def _run(self, image: Tensor) -> Tensor:
        try:
            result = self._module(image.clone())
        except Exception as error:
            shape = "×".join(map(str, image.shape))
            reason = first_line(error)
            raise ModelError(f"{self._name} could not be run at {shape}: {reason}") from error
        if not isinstance(result, Tensor) or result.dim() != image.dim():
            raise ModelError(f"{self._name} does not return a tensor with the dims of its input")
        return result

    def sizes(self) -> tuple[int | Fraction, ...]:
        """Return the result's size by dim, as a `Fraction` of the input's where it scales."""
        found = set[tuple[int | Fraction, ...]]()
        for size in _SIZES[:2]:
            image = self._image(size)
            result = self._run(image)
            if not torch.equal(result, self._run(image)):
                raise ModelError(f"{self._name} draws random numbers")
            if any(self._run(other).shape != result.shape for other in (-image, 0 * image)):
                raise ModelError(f"the output shape of {self._name} depends on values of the input")
            found.add(
                tuple(
                    self._size(dim, *at)
                    for dim, at in enumerate(zip(image.shape, result.shape, strict=True))
                )
            )
        sizes = found.pop()
        scales = [Fraction(sizes[dim]) for dim in self._sides]
        if found or any(1 not in (one.numerator, one.denominator) for one in scales):
            raise ModelError(f"{self._name} has no fixed scale between its input and its output")
        rows, divided = self._example.shape[self._axis], Fraction(sizes[self._axis]).denominator
        if rows % divided:
            raise ModelError(
                f"{self._name} makes one row from {divided}, which does not divide the"
                f" {rows} rows of its input"
            )
        return sizes

    def _size(self, dim: int, given: int, made: int) -> int | Fraction:
        scaled = dim in self._sides or (dim == 0 and given == made)
        return Fraction(made, given) if scaled else made

    def halo(self, scale: Fraction) -> int:
        """Return the most rows between a result row and an input row that it depends on."""
        for wanted in _SIZES:
            image = self._image(wanted)
            size, before = image.shape[self._axis], self._run(image)
            farthest = 0
            for row, odd in itertools.product(_rows_to_replace(size), _REPLACEMENTS):
                changed = image.clone()
                changed.select(self._axis, row).fill_(odd)
                differs = (self._run(changed) != before).movedim(self._axis, 0).flatten(1)
                places = differs.any(1).nonzero()
                if len(places):
                    low, high = (int(int(end) / scale) for end in (places[0], places[-1]))
                    farthest = max(farthest, row - low, high + scale.denominator - 1 - row)
                if farthest >= size // 3:
                    break
            if farthest < size // 3:
                return farthest
        raise ModelError(f"rows of {self._name} depend on rows far away, or on all of them")

    def bands_match(self, block: OpaqueModuleOp) -> bool:
        """Whether bands equal the whole at both ends and inside, for several heights."""
        image = self._image(_SIZES[1])
        whole = self._run(image)
        types = [image.dtype, *(weight.dtype for weight in self._module.parameters())]
        allowed = dtype_tolerance(types) * whole.abs().max().item()
        return all(
            self._max_difference(block, image, whole, span) <= allowed
            for span in _spans(whole.shape[self._axis])
        )

    def _max_difference(
        self, block: OpaqueModuleOp, image: Tensor, whole: Tensor, span: Span
    ) -> float:
        size = image.shape[self._axis]
        low, high = block.receptive_field(span, size)
        wanted = whole.narrow(self._axis, span[0], span[1] - span[0])
        rows = block.run_band(image.narrow(self._axis, low, high - low), span, size)
        return (rows - wanted).abs().max().item() if rows.shape == wanted.shape else float("inf")


def _rows_to_replace(size: int) -> Iterator[int]:
    """Yield the rows to replace: both ends, and a stretch in the middle.

    Windows may begin anywhere in the stretch.
    """
    yield from (0, 1, size - 2, size - 1)
    yield from range(size // 2 - 8, size // 2 + 8)


def _spans(size: int) -> Iterator[Span]:
    """Yield bands of different positions and heights."""
    yield from ((0, size), (0, size // 3), (size - size // 3, size), (size // 2, size // 2 + 1))
    for first, height in zip(range(3, size // 2, 7), itertools.cycle((5, 8, 13, 16)), strict=False):
        yield first, first + height


AnyOpaqueModule = OpaqueModuleOp | RowRegionOp

# Placeholder operator of an opaque module during capture; only its shape is used.
_library = torch.library.Library("lowtide", "DEF")
_library.define("block(Tensor image, int which, int[] shape) -> Tensor")


@torch.library.register_fake("lowtide::block", lib=_library)
def _block(image: Tensor, which: int, shape: Sequence[int]) -> Tensor:
    return image.new_empty(shape)


class OpaqueModuleSearch:
    """Opaque submodules of a model, by module.

    Args:
        module: Model to capture.
        inputs: Arguments for which it is captured; the rows of a submodule's input lie along the
            same dim.
        autocast: Autocast state under which the modules run.
    """

    def __init__(self, module: nn.Module, inputs: ModelInputs, autocast: AutocastState) -> None:
        self._inputs = inputs
        self._names = {inner: name or "the model" for name, inner in module.named_modules()}
        # A trace may call PyTorch's proxy of a module, which shares its attributes.
        self._originals = {id(vars(inner)): inner for inner in self._names}
        # Modules that declare their rows need no graph. Equal modules share their measurements.
        work: dict[str, dict[tuple[int, int, int], int]] = {}
        self._opaque: dict[nn.Module, AnyOpaqueModule] = {
            inner: RowRegionOp(name, inner, autocast, work.setdefault(_workspace_key(inner), {}))
            for inner, name in self._names.items()
            if isinstance(inner, RowRegionModule)
        }
        self._call_stack: list[tuple[nn.Module, Tensor | None]] = []

    @property
    def modules(self) -> list[AnyOpaqueModule]:
        """Opaque modules in the order in which they were found."""
        return list(self._opaque.values())

    @contextmanager
    def with_placeholders(self) -> Iterator[None]:
        """Replace opaque modules by placeholder operators, and record module calls."""
        self._call_stack, self._thread = [], threading.get_ident()
        hooks = [inner.register_forward_pre_hook(self._enter) for inner in self._names]
        hooks += [inner.register_forward_hook(self._leave) for inner in self._names]
        own = {module: module.__dict__.get("forward") for module in self._opaque}
        for which, (module, block) in enumerate(self._opaque.items()):
            module.forward = _placeholder_forward(which, block, module.forward)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, forward in own.items():
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _enter(self, module: nn.Module, given: tuple[object, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        image = given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None
        if image is not None and not (
            image.is_floating_point() and self._is_like_input(image.shape)
        ):
            image = None
        self._call_stack.append((self._originals.get(id(vars(module)), module), image))

    def _is_like_input(self, shape: Sequence[int]) -> bool:
        first = self._inputs.first
        return len(shape) == first.dim() and (shape[0] == len(first) or not self._inputs.batched)

    def _leave(self, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self._call_stack.pop()

    def failed_module(self, default: str) -> str:
        """Return path and class of the innermost module in which the last capture failed.

        Returns ``default`` if that is the model itself.
        """
        for module, _ in reversed(self._call_stack):
            if (name := self._names.get(module)) and name != "the model":
                return f"{name} ({type(module).__name__})"
        return default

    def add_failed(self) -> bool:
        """Make the innermost module in which the last capture failed opaque.

        Outer modules are tried if it cannot be. Returns False if no module could be tried.

        Raises:
            ModelError: Some could be tried, but none has a small receptive field.
        """
        refusal: ModelError | None = None
        for module, image in reversed(self._call_stack):
            if image is None or module in self._opaque or module not in self._names:
                continue
            try:
                self._opaque[module] = probe_halo(
                    self._names[module], module, image, self._inputs.axis
                )
                return True
            except ModelError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        return False


def _workspace_key(module: nn.Module) -> str:
    """Return a key of modules with equal workspace: everything but weight values."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    facts: list[object] = [(name, one.shape, one.dtype, one.device) for name, one in tensors]
    for inner in module.modules():
        own = {name: value for name, value in vars(inner).items() if name not in MODULE_ATTRIBUTES}
        facts += [type(inner), own]
    return str(facts)


def _placeholder_forward(
    which: int, block: AnyOpaqueModule, original: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    thread = threading.get_ident()

    def forward(image: Tensor) -> Tensor:
        if threading.get_ident() != thread:
            return original(image)
        return torch.ops.lowtide.block(image, which, block.output_shape(image.shape))

    return forward
