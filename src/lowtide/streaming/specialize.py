"""Networks made faster for the shape of their tiles: compiled, or as a CUDA graph.

PyTorch's compiler fuses light operators. A CUDA graph launches all kernels of a call at once: on
small tiles, a light network ends before Python has launched its next operator.

Compiled tiles take 0.83 to 0.89 of the time, after 12 to 17 seconds of compiling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.logging import silence_warnings
from lowtide.memory.oom import is_out_of_memory
from lowtide.streaming.tiles.network import Forward, RunnableNetwork

# What `specialize_network` does, by whether it captures a graph.
SPECIALIZING = "compiling", "capturing a CUDA graph"
# Of the result's largest absolute value: what is fused rounds differently, some of it less often.
_TOLERANCE, _LOW_TOLERANCE = {"fp32": 1e-4}, 5e-2
# Shapes for which one network may be compiled in a process: a folder may have images of many sizes.
_SHAPES = 256


def require_cuda_graphs(device: str) -> None:
    """Raise `UsageError` for a device without CUDA graphs."""
    if torch.device(device).type != "cuda":
        hint = "leave out --cuda-graphs, or choose a GPU with --device"
        raise UsageError(f"{device} has no CUDA graphs: they need an NVIDIA GPU", hint=hint)


def specialize_network(
    network: RunnableNetwork, shape: tuple[int, ...], *, as_graph: bool
) -> RunnableNetwork:
    """Return ``network`` compiled, or as a CUDA graph, for inputs of ``shape`` (B, C, H, W).

    Accuracy: exact up to rounding, compared on random values.

    Raises:
        ModelError: It fails, or the result differs.
    """
    plain, title = network.forward, SPECIALIZING[as_graph]
    make, hint = _compiled, "--compile off"
    if as_graph:
        make, hint = _captured, "leave out --cuda-graphs"
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(network.device)
    images = images.contiguous(memory_format=network.memory_format)
    with torch.inference_mode():
        expected = plain(images)
        try:
            fast = make(plain, images)
            difference = (fast(images) - expected).abs().max()
        except Exception as error:  # of any part of the compiler: PyTorch, Triton, a C++ compiler
            if is_out_of_memory(error):
                raise
            line = str(error).strip().partition("\n")[0]
            message = f"{title} fails for this network: {type(error).__name__}: {line}"
            raise ModelError(message, hint=hint) from error
        allowed = expected.abs().max() * _TOLERANCE.get(network.precision, _LOW_TOLERANCE)
    if not difference <= allowed:  # written so that NaN does not pass as equal
        message = f"{title} changes the result by {difference:.1e}: it is not used"
        raise ModelError(message, hint=hint)

    def forward(given: Tensor) -> Tensor:
        # Other shapes, as at the end of a row of tiles, are too few to pay for compiling.
        return fast(given) if given.shape == shape else plain(given)

    return replace(network, forward=forward)


def import_compiler_libraries() -> None:
    """Import the many libraries that only compiling needs."""
    import torch._inductor.compile_fx  # noqa: F401


def _compiled(plain: Forward, images: Tensor) -> Forward:
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
    ):
        fast(images)
    return fast


def _captured(plain: Forward, images: Tensor) -> Forward:
    # Captured for zeros, so that the first comparison shows whether a replay reads its input. Of a
    # module itself, PyTorch would replace the forward, which runs other shapes too.
    capture: Any = torch.cuda.make_graphed_callables
    with torch.cuda.device_of(images):
        replay = capture(lambda given: plain(given), (torch.zeros_like(images),))
    return lambda given: replay(given).clone()  # the next replay overwrites what it returns
