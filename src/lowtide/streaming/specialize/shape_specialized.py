"""A network specialized for one input shape, verified against the original."""

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

# Relative to the result's largest absolute value. Fused operators round differently, some of them
# less often.
_TOLERANCE = {"fp32": 1e-4}
_LOW_TOLERANCE = 5e-2
_RUNS = 3


class SpecializationGain(BaseModel):
    """Time and memory of a specialization, and its speedup on this machine.

    Attributes:
        ratio: Time of a run divided by that of the original network.
        warmup_seconds: Time before the first result, with whatever PyTorch's own cache held.
        host_bytes: Peak of host memory for it; 0 where it was not measured.
    """

    model_config = ConfigDict(frozen=True)

    ratio: float
    warmup_seconds: float
    host_bytes: int = 0


class ShapeSpecialized(nn.Module):
    """Module that runs ``fast`` for inputs of one shape and ``plain`` for all others.

    Other shapes occur at the end of a row of tiles, for example.
    """

    fast: Any

    def __init__(
        self, plain: nn.Module, shape: tuple[int, ...], fast: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.plain, self.shape = plain, shape
        # Not registered as a submodule: PyTorch would register the parameters in ``fast`` twice.
        self.__dict__["fast"] = fast

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's result for ``(B, C, H, W)``."""
        return self.fast(images) if images.shape == self.shape else self.plain(images)


@contextlib.contextmanager
def as_model_error(error_type: type[Exception], message: str, hint: str) -> Iterator[None]:
    """Context manager: turn device or compiler errors into a one-line `ModelError`.

    Out-of-memory errors pass unchanged.
    """
    try:
        yield
    except error_type as error:
        if is_out_of_memory(error):
            raise
        what = str(error).strip().partition("\n")[0]
        raise ModelError(f"{message}: {type(error).__name__}: {what}", hint=hint) from error


def verify_close(
    difference: float | Tensor, tolerance: float | Tensor, name: str, hint: str | None = None
) -> None:
    """Raise `ModelError` if the difference to the original exceeds what is allowed.

    Both are numbers or scalar tensors.
    """
    if not difference <= tolerance:  # written so that NaN does not pass as equal
        raise ModelError(
            f"the result of the {name} differs by {difference:.1e}: it is not used", hint=hint
        )


def specialize(
    network: NetworkSpec,
    shape: tuple[int, ...],
    make: Callable[[nn.Module, Tensor], tuple[Callable[[Tensor], Tensor], Tensor]],
    name: str,
) -> tuple[NetworkSpec, SpecializationGain]:
    """Specialize ``network`` for inputs of ``shape``, verify the result and time it.

    Accuracy: exact up to rounding, compared on random values.

    Args:
        network: The network to specialize.
        shape: Input shape, (B, C, H, W).
        make: Takes the module and an input; returns the fast function and its first result.
        name: What the result is called in error messages.

    Raises:
        ModelError: The result differs.
    """
    module = network.forward
    assert isinstance(module, nn.Module)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    images = images.to(network.device)
    images = images.contiguous(memory_format=network.memory_format)
    with torch.inference_mode():
        expected = module(images)
        started = time.perf_counter()
        specialized, result = make(module, images)
        _wait(images)
        warmup = time.perf_counter() - started
        fast = ShapeSpecialized(module, shape, specialized)
        difference = (result - expected).abs().max()
        tolerance = _TOLERANCE.get(network.precision, _LOW_TOLERANCE) * expected.abs().max()
        verify_close(difference, tolerance, f"{name} network")
        del result, expected
        ratio = _seconds(fast, images) / _seconds(module, images)
    return replace(network, forward=fast), SpecializationGain(ratio=ratio, warmup_seconds=warmup)


def _seconds(run: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Return the best time of a few runs.

    On the CPU the processor time, which other programs disturb less.
    """
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
