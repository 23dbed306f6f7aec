"""`torch.compile` of a network for one input shape, and its measured gain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from pydantic import ValidationError
from torch import Tensor, nn

from lowtide.core.logging import silence_warnings
from lowtide.memory.cache import MeasurementCache, cache_folder
from lowtide.streaming.specialize.shape_specialized import (
    SpecializationGain,
    as_model_error,
    specialize,
)
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Shapes for which one network may be compiled in a process: a folder may have images of many sizes.
_SHAPES = 256


class CompileCache:
    """On-disk cache of measured compile gains, by model, device and precision."""

    def __init__(self, device: str) -> None:
        self._store = MeasurementCache("compiled", cache_folder(), device=device)

    def get(self, sha256: str, precision: str) -> SpecializationGain | None:
        """Return the gain that an earlier run measured, or None."""
        known = self._store.get(f"{sha256} {precision}")
        with contextlib.suppress(ValidationError):  # an entry of another version is measured again
            return None if known is None else SpecializationGain.model_validate(known)
        return None

    def put(self, sha256: str, precision: str, gain: SpecializationGain) -> None:
        """Store the gain for later runs."""
        self._store.put(f"{sha256} {precision}", gain.model_dump())
        self._store.save()


def compile_for(
    network: NetworkSpec, shape: tuple[int, ...]
) -> tuple[NetworkSpec, SpecializationGain]:
    """Compile ``network`` for inputs of ``shape``, and measure the gain.

    Accuracy: exact up to rounding, compared on random values. Raises `ModelError` where PyTorch
    cannot compile it or the result differs.
    """
    return specialize(network, shape, _compiled, "compiled")


def preload_compiler() -> None:
    """Import the many libraries that only compiling needs."""
    import torch._dynamo.backends.inductor
    import torch._inductor.compile_fx  # noqa: F401


def _compiled(plain: nn.Module, images: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    import torch._dynamo.config
    import torch._inductor.config

    fast = torch.compile(plain, dynamic=False)
    # Compile in this process, whose memory is counted, rather than in one worker for each core. A
    # build for CUDA warns where there is no GPU.
    with (
        torch._inductor.config.patch(compile_threads=1),
        # Above its recompile limit, PyTorch silently falls back to eager mode.
        torch._dynamo.config.patch(
            recompile_limit=_SHAPES,
            accumulated_recompile_limit=4 * _SHAPES,
            fail_on_recompile_limit_hit=True,
        ),
        silence_warnings("torch.utils.cpp_extension"),
        # The compiler raises errors of its parts: PyTorch, Triton, or a C++ compiler.
        as_model_error(Exception, "PyTorch cannot compile this network", "--compile off"),
    ):
        return fast, fast(images)
