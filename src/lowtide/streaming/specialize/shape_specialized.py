"""A network made faster for inputs of one shape, and proof that it still is the same."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.memory.oom import is_out_of_memory
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Of the largest number of the result. Fused operators round otherwise, some of them less.
_TOLERANCE = {"fp32": 1e-4}
_LOW_TOLERANCE = 5e-2
_RUNS = 3


class SpecializationGain(BaseModel):
    """What it took to make a network faster, and what that gained on this machine.

    ``ratio`` is a run's time against that of the network as it is, ``warmup_seconds`` what passed
    before the first result, with whatever PyTorch's own cache had of it; ``host_bytes`` is what
    that took of the host's memory at most, 0 where it was not measured.
    """

    model_config = ConfigDict(frozen=True)

    ratio: float
    warmup_seconds: float
    host_bytes: int = 0


class ShapeSpecialized(nn.Module):
    """``plain``, by ``fast`` for inputs of one shape; others, as at the end of a row, run as it
    is."""

    fast: Any

    def __init__(
        self, plain: nn.Module, shape: tuple[int, ...], fast: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.plain, self.shape = plain, shape
        # PyTorch would register what ``fast`` holds a second time.
        self.__dict__["fast"] = fast

    def forward(self, images: Tensor) -> Tensor:
        """(images, channels, height, width) as the network takes them."""
        return self.fast(images) if images.shape == self.shape else self.plain(images)


@contextlib.contextmanager
def as_model_error(kind: type[Exception], says: str, hint: str) -> Iterator[None]:
    """What a device or a compiler raises, as a `ModelError` in one line; a lack of memory stays
    one."""
    try:
        yield
    except kind as error:
        if is_out_of_memory(error):
            raise
        what = str(error).strip().partition("\n")[0]
        raise ModelError(f"{says}: {type(error).__name__}: {what}", hint=hint) from error


def verify_close(
    apart: float | Tensor, allowed: float | Tensor, what: str, hint: str | None = None
) -> None:
    """Raise `ModelError` if what was made faster is further apart from what it was made of."""
    if not apart <= allowed:  # so that what is not a number is not taken for equal
        raise ModelError(f"the {what} differs by {apart:.1e}: it is not used", hint=hint)


def specialize(
    network: NetworkSpec,
    shape: tuple[int, ...],
    make: Callable[[nn.Module, Tensor], tuple[Callable[[Tensor], Tensor], Tensor]],
    called: str,
) -> tuple[NetworkSpec, SpecializationGain]:
    """``network`` by what ``make`` makes of its module and an input of ``shape``, and its first
    result.

    Accuracy: exact up to rounding, compared on random numbers. Raises `ModelError` where the result
    of what is ``called`` so differs.
    """
    module = network.forward
    assert isinstance(module, nn.Module)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    images = images.to(network.device)
    images = images.contiguous(memory_format=network.memory_format)
    with torch.inference_mode():
        expected = module(images)
        started = time.perf_counter()
        made, result = make(module, images)
        _wait(images)
        warmup = time.perf_counter() - started
        fast = ShapeSpecialized(module, shape, made)
        apart = (result - expected).abs().max()
        tolerance = _TOLERANCE.get(network.precision, _LOW_TOLERANCE) * expected.abs().max()
        verify_close(apart, tolerance, f"{called} network")
        del result, expected
        ratio = _seconds(fast, images) / _seconds(module, images)
    return replace(network, forward=fast), SpecializationGain(ratio=ratio, warmup_seconds=warmup)


def _seconds(run: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """The best of a few runs; on the CPU of processor time, which other programs disturb less."""
    clock = time.perf_counter if images.device.type == "cuda" else time.process_time
    taken = []
    for _ in range(_RUNS):
        started = clock()
        run(images)
        _wait(images)
        taken.append(clock() - started)
    return min(taken)


def _wait(images: Tensor) -> None:
    if images.device.type == "cuda":
        torch.cuda.synchronize(images.device)
