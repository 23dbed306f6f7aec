"""A network compiled by PyTorch for one shape of input, and what that is worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.core.quiet import errors_only
from lowtide.memory.failures import is_out_of_memory
from lowtide.memory.store import FactStore, cache_folder
from lowtide.streaming.step import Network

# Of the largest number of the result. Fused operators round otherwise, some of them less.
_TOLERANCE = {"fp32": 1e-4}
_LOW_TOLERANCE = 5e-2
_RUNS = 3
# For which one network is compiled in a process at most: a folder may have images of many sizes.
_SHAPES = 256


class CompileFacts(BaseModel):
    """What compiling a network took and gained on this machine.

    ``ratio`` is a run's time against that of the network as it is, ``warmup_seconds`` what passed
    before the first result, with whatever PyTorch's own cache had of it; ``host_bytes`` is what
    the compiler took at most, 0 where that was not measured.
    """

    model_config = ConfigDict(frozen=True)

    ratio: float
    warmup_seconds: float
    host_bytes: int = 0


class CompileStore:
    """What is known of compiling each model, by device and precision."""

    def __init__(self, device: str) -> None:
        self._facts = FactStore("compiled", cache_folder(), device=device)

    def get(self, sha256: str, precision: str) -> CompileFacts | None:
        """What a former run found out, or None."""
        known = self._facts.get(f"{sha256} {precision}")
        return None if known is None else CompileFacts.model_validate(known)

    def put(self, sha256: str, precision: str, facts: CompileFacts) -> None:
        """Remember it for later runs."""
        self._facts.put(f"{sha256} {precision}", facts.model_dump())
        self._facts.save()


class ForOneShape(nn.Module):
    """``plain``, compiled for inputs of one shape; others, as at the end of a row, run as it is."""

    fast: Any

    def __init__(self, plain: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.plain, self.shape = plain, shape
        # Its name for PyTorch is that of the plain one: nothing is registered twice.
        self.__dict__["fast"] = torch.compile(plain, dynamic=False)

    def forward(self, images: Tensor) -> Tensor:
        """(images, channels, height, width) as the network takes them."""
        return self.fast(images) if images.shape == self.shape else self.plain(images)


def compile_for(network: Network, shape: tuple[int, ...]) -> tuple[Network, CompileFacts]:
    """``network`` compiled for inputs of ``shape``, and what that took and gains.

    Accuracy: exact up to rounding, compared on random numbers. Raises `ModelError` where PyTorch
    cannot compile it or the result differs.
    """
    assert isinstance(network.forward, nn.Module)
    fast = ForOneShape(network.forward, shape)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    images = images.to(network.device)
    images = images.contiguous(memory_format=network.memory_format)
    with torch.inference_mode():
        expected = network.forward(images)
        started = time.perf_counter()
        result = _compiled(fast, images)
        warmup = time.perf_counter() - started
        apart = (result - expected).abs().max()
        tolerance = _TOLERANCE.get(network.precision, _LOW_TOLERANCE) * expected.abs().max()
        if not apart <= tolerance:  # so that what is not a number is not taken for equal
            raise ModelError(f"the compiled network differs by {apart:.1e}: it is not used")
        del result, expected
        ratio = _seconds(fast, images) / _seconds(network.forward, images)
    return replace(network, forward=fast), CompileFacts(ratio=ratio, warmup_seconds=warmup)


def load_compiler() -> None:
    """Load the libraries that only compiling needs, which are many."""
    import torch._dynamo.backends.inductor
    import torch._inductor.compile_fx  # noqa: F401


def _compiled(fast: ForOneShape, images: Tensor) -> Tensor:
    import torch._dynamo.config
    import torch._inductor.config

    # In this process, where it is counted, and not in one for each core beside it. A build for
    # cards warns where there is none.
    with (
        torch._inductor.config.patch(compile_threads=1),
        # PyTorch runs a network of more shapes than it likes as it is, without a word.
        torch._dynamo.config.patch(
            recompile_limit=_SHAPES, accumulated_recompile_limit=4 * _SHAPES,
            fail_on_recompile_limit_hit=True,
        ),
        errors_only("torch.utils.cpp_extension"),
    ):
        try:
            return fast(images)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # The compiler raises what its parts do: of PyTorch, of Triton, of a C++ compiler.
            what = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"PyTorch cannot compile this network: {type(error).__name__}: {what}",
                hint="--compile off",
            ) from error


def _seconds(run: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """The best of a few runs; on the CPU of processor time, which other programs disturb less."""
    on_card = images.device.type == "cuda"
    clock = time.perf_counter if on_card else time.process_time
    taken = []
    for _ in range(_RUNS):
        started = clock()
        run(images)
        if on_card:
            torch.cuda.synchronize(images.device)
        taken.append(clock() - started)
    return min(taken)
