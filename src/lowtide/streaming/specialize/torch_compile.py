"""A network compiled by PyTorch for one shape of input, and what is remembered of that."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lowtide.core.logging import silence_warnings
from lowtide.memory.cache import FactStore, cache_folder
from lowtide.streaming.specialize.shape_specialized import (
    SpecializationGain,
    as_model_error,
    specialize,
)
from lowtide.streaming.tiles.tile_step import NetworkSpec

# For which one network is compiled in a process at most: a folder may have images of many sizes.
_SHAPES = 256


class CompileCache:
    """What is known of compiling each model, by device and precision."""

    def __init__(self, device: str) -> None:
        self._facts = FactStore("compiled", cache_folder(), device=device)

    def get(self, sha256: str, precision: str) -> SpecializationGain | None:
        """What a former run found out, or None."""
        known = self._facts.get(f"{sha256} {precision}")
        return None if known is None else SpecializationGain.model_validate(known)

    def put(self, sha256: str, precision: str, facts: SpecializationGain) -> None:
        """Remember it for later runs."""
        self._facts.put(f"{sha256} {precision}", facts.model_dump())
        self._facts.save()


def compile_for(
    network: NetworkSpec, shape: tuple[int, ...]
) -> tuple[NetworkSpec, SpecializationGain]:
    """``network`` compiled for inputs of ``shape``, and what that took and gains.

    Accuracy: exact up to rounding, compared on random numbers. Raises `ModelError` where PyTorch
    cannot compile it or the result differs.
    """
    return specialize(network, shape, _compiled, "compiled")


def preload_compiler() -> None:
    """Load the libraries that only compiling needs, which are many."""
    import torch._dynamo.backends.inductor
    import torch._inductor.compile_fx  # noqa: F401


def _compiled(plain: nn.Module, images: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    import torch._dynamo.config
    import torch._inductor.config

    fast = torch.compile(plain, dynamic=False)
    # In this process, where it is counted, and not in one for each core beside it. A build for
    # cards warns where there is none.
    with (
        torch._inductor.config.patch(compile_threads=1),
        # PyTorch runs a network of more shapes than it likes as it is, without a word.
        torch._dynamo.config.patch(
            recompile_limit=_SHAPES,
            accumulated_recompile_limit=4 * _SHAPES,
            fail_on_recompile_limit_hit=True,
        ),
        silence_warnings("torch.utils.cpp_extension"),
        # The compiler raises what its parts do: of PyTorch, of Triton, of a C++ compiler.
        as_model_error(Exception, "PyTorch cannot compile this network", "--compile off"),
    ):
        return fast, fast(images)
