"""Modules inside a model of which no graph can be had, and the blocks that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowtide.attention.spatial.known_rows import KnownRows
from lowtide.core.errors import ModelError
from lowtide.streaming.bands.block import Block
from lowtide.streaming.bands.block_proof import prove
from lowtide.streaming.bands.known_block import KnownBlock

AnyBlock = Block | KnownBlock
# Attributes that are none of a module's own: tables of its tensors, parts and hooks.
_EVERY_MODULES = frozenset(vars(nn.Module()))

# The place of a block in a graph while it is made; only its shape is ever asked for.
_library = torch.library.Library("lowtide", "DEF")
_library.define("block(Tensor image, int which, int[] shape) -> Tensor")


@torch.library.register_fake("lowtide::block", lib=_library)
def _block(image: Tensor, which: int, shape: Sequence[int]) -> Tensor:
    return image.new_empty(shape)


class Blocks:
    """The blocks of one module for so many images at once, by the modules inside it that they stand
    for."""

    def __init__(self, module: nn.Module, images: int = 1) -> None:
        self._images = images
        self._names = {inner: name or "the model" for name, inner in module.named_modules()}
        # Modules that tell their rows need no graph. A model has many of a kind.
        work: dict[str, dict[tuple[int, int, int], int]] = {}
        self._found: dict[nn.Module, AnyBlock] = {
            inner: KnownBlock(name, inner, work.setdefault(_kind(inner), {}))
            for inner, name in self._names.items() if isinstance(inner, KnownRows)
        }
        self._entered: list[tuple[nn.Module, Tensor | None]] = []

    @property
    def found(self) -> list[AnyBlock]:
        """In the order in which they were found."""
        return list(self._found.values())

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, calls of blocks are single operators, and calls of modules are watched."""
        self._entered = []
        hooks = [inner.register_forward_pre_hook(self._enter) for inner in self._names]
        hooks += [inner.register_forward_hook(self._leave) for inner in self._names]
        own = {module: module.__dict__.get("forward") for module in self._found}
        for which, (module, block) in enumerate(self._found.items()):
            module.forward = _stand_in(which, block)
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
        image = given[0] if len(given) == 1 else None
        if not (isinstance(image, Tensor) and image.dim() == 4 and len(image) == self._images):
            image = None
        self._entered.append((module, image))

    def _leave(self, *_: object) -> None:
        self._entered.pop()

    def add(self) -> bool:
        """Make a block of the innermost module that the last capture did not get out of.

        False where there is none, or none whose rows can be told apart. Raises `ModelError` saying
        why not, if one could be asked.
        """
        refusal: ModelError | None = None
        for module, image in reversed(self._entered):
            if image is None or module in self._found:
                continue
            try:
                self._found[module] = prove(self._names[module], module, image)
                return True
            except ModelError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        return False


def _kind(module: nn.Module) -> str:
    """What modules that take the same memory have in common: all but the values of weights."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    facts: list[object] = [(name, one.shape, one.dtype, one.device) for name, one in tensors]
    for inner in module.modules():
        own = {name: value for name, value in vars(inner).items() if name not in _EVERY_MODULES}
        facts += [type(inner), own]
    return str(facts)


def _stand_in(which: int, block: AnyBlock) -> Callable[[Tensor], Tensor]:
    def forward(image: Tensor) -> Tensor:
        return torch.ops.lowtide.block(image, which, block.shape(image.shape))

    return forward
