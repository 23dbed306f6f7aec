"""Search for submodules that cannot be captured, and the operators in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowtide.attention.spatial.row_region import RowRegionModule
from lowtide.core.errors import ModelError
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.halo_probe import probe_halo
from lowtide.streaming.capture.opaque_module import OpaqueModule
from lowtide.streaming.capture.region_module import RegionModule
from lowtide.streaming.module_fingerprint import EVERY_MODULES

AnyOpaqueModule = OpaqueModule | RegionModule

# Placeholder operator of an opaque module during capture; only its shape is used.
_library = torch.library.Library("lowtide", "DEF")
_library.define("block(Tensor image, int which, int[] shape) -> Tensor")


@torch.library.register_fake("lowtide::block", lib=_library)
def _block(image: Tensor, which: int, shape: Sequence[int]) -> Tensor:
    return image.new_empty(shape)


class OpaqueModules:
    """Opaque submodules of a model for a batch of ``images``, by module.

    Args:
        module: Model to capture.
        images: Batch size of the captured input.
        autocast: Autocast state under which the modules run.
    """

    def __init__(self, module: nn.Module, images: int, autocast: AutocastState) -> None:
        self._images = images
        self._names = {inner: name or "the model" for name, inner in module.named_modules()}
        # A trace may call PyTorch's proxy of a module, which shares its attributes.
        self._real = {id(vars(inner)): inner for inner in self._names}
        # Modules that declare their rows need no graph. Equal modules share their measurements.
        work: dict[str, dict[tuple[int, int, int], int]] = {}
        self._found: dict[nn.Module, AnyOpaqueModule] = {
            inner: RegionModule(name, inner, autocast, work.setdefault(_kind(inner), {}))
            for inner, name in self._names.items()
            if isinstance(inner, RowRegionModule)
        }
        self._entered: list[tuple[nn.Module, Tensor | None]] = []

    @property
    def found(self) -> list[AnyOpaqueModule]:
        """Opaque modules in the order in which they were found."""
        return list(self._found.values())

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Replace opaque modules by placeholder operators, and record module calls."""
        self._entered, self._thread = [], threading.get_ident()
        hooks = [inner.register_forward_pre_hook(self._enter) for inner in self._names]
        hooks += [inner.register_forward_hook(self._leave) for inner in self._names]
        own = {module: module.__dict__.get("forward") for module in self._found}
        for which, (module, block) in enumerate(self._found.items()):
            module.forward = _stand_in(which, block, module.forward)
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
        image = given[0] if len(given) == 1 else None
        if not (isinstance(image, Tensor) and image.dim() == 4 and len(image) == self._images):
            image = None
        self._entered.append((self._real.get(id(vars(module)), module), image))

    def _leave(self, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self._entered.pop()

    def entered(self, otherwise: str) -> str:
        """Return path and class of the innermost module in which the last capture failed.

        Returns ``otherwise`` if that is the model itself.
        """
        for module, _ in reversed(self._entered):
            if (name := self._names.get(module)) and name != "the model":
                return f"{name} ({type(module).__name__})"
        return otherwise

    def add(self) -> bool:
        """Make the innermost module in which the last capture failed opaque.

        Outer modules are tried if it cannot be. Returns False if no module could be tried.

        Raises:
            ModelError: Some could be tried, but none has a small receptive field.
        """
        refusal: ModelError | None = None
        for module, image in reversed(self._entered):
            if image is None or module in self._found or module not in self._names:
                continue
            try:
                self._found[module] = probe_halo(self._names[module], module, image)
                return True
            except ModelError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        return False


def _kind(module: nn.Module) -> str:
    """Return a key of modules with equal workspace: everything but weight values."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    facts: list[object] = [(name, one.shape, one.dtype, one.device) for name, one in tensors]
    for inner in module.modules():
        own = {name: value for name, value in vars(inner).items() if name not in EVERY_MODULES}
        facts += [type(inner), own]
    return str(facts)


def _stand_in(
    which: int, block: AnyOpaqueModule, plain: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    thread = threading.get_ident()

    def forward(image: Tensor) -> Tensor:
        if threading.get_ident() != thread:
            return plain(image)
        return torch.ops.lowtide.block(image, which, block.shape(image.shape))

    return forward
