"""Search for submodules that cannot be captured, and the operators in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowtide.attention.spatial.local_window import RowRegionModule
from lowtide.core.errors import ModelError
from lowtide.memory.tracing.python_places import MODULE_ATTRIBUTES
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.halo_probe import probe_halo
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.capture.opaque_module import OpaqueModule, RegionModule

AnyOpaqueModule = OpaqueModule | RegionModule

# Placeholder operator of an opaque module during capture; only its shape is used.
_library = torch.library.Library("lowtide", "DEF")
_library.define("block(Tensor image, int which, int[] shape) -> Tensor")


@torch.library.register_fake("lowtide::block", lib=_library)
def _block(image: Tensor, which: int, shape: Sequence[int]) -> Tensor:
    return image.new_empty(shape)


class OpaqueModules:
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
            inner: RegionModule(name, inner, autocast, work.setdefault(_workspace_key(inner), {}))
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
