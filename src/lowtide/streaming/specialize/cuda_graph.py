"""CUDA-graph replay of a network for one input shape.

A light network on small tiles ends before Python has launched the next operator. A CUDA graph (CUDA
C++ Programming Guide, "CUDA Graphs") launches all kernels at once. It reads and writes the memory
of its capture: inputs are copied there, and the result is copied out before the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.streaming.specialize.shape_specialized import (
    SpecializationGain,
    as_model_error,
    specialize,
)
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Warm-up runs before the capture: libraries initialize in the first runs, which must not be
# captured.
_WARMUPS = 3


class GraphRecorder(Protocol):
    """Captures a call as a CUDA graph on a device."""

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return what the captured call returns, and a function that recomputes it in place."""
        ...


class GraphRecording:
    """CUDA graph of a function for inputs of the shapes and memory formats of ``inputs``.

    The function returns a tensor or a list of these. Holds the memory of the run while it is alive.
    All calls must be made on one stream, which serializes them.
    """

    def __init__(self, forward: Callable[..., Any], record: GraphRecorder, *inputs: Tensor) -> None:
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._static_inputs = [_clone(one) for one in inputs]
        self._static_output, self._replay = record(lambda: forward(*self._static_inputs))

    def __call__(self, *inputs: Tensor) -> Any:
        """Replay the graph and return a copy of the result."""
        made = self.replay(*inputs)
        return _clone(made) if isinstance(made, Tensor) else [_clone(one) for one in made]

    def replay(self, *inputs: Tensor) -> Any:
        """Replay the graph and return its result, which the next call overwrites."""
        for static, given in zip(self._static_inputs, inputs, strict=True):
            static.copy_(given)
        self._replay()
        return self._static_output


def _clone(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.preserve_format)


def cuda_graph_for(
    network: NetworkSpec, shape: tuple[int, ...], recorder: GraphRecorder | None = None
) -> tuple[NetworkSpec, SpecializationGain]:
    """Capture ``network`` as a CUDA graph for inputs of ``shape``; measure the gain.

    Accuracy: exact up to rounding, compared on random values. ``recorder`` is by default that of
    CUDA.

    Raises:
        ModelError: The network cannot be captured, for example because it copies values to the
            host, or the result differs.
        UsageError: The device has no CUDA graphs.
    """
    device_recorder = recorder or graph_recorder_for(network.device)

    def make(plain: nn.Module, images: Tensor) -> tuple[GraphRecording, Tensor]:
        says = "this network cannot be captured as a CUDA graph"
        with as_model_error(RuntimeError, says, "leave out --cuda-graphs"):
            recording = GraphRecording(plain, device_recorder, images)
            return recording, recording(images)

    return specialize(network, shape, make, "captured")


def require_cuda_graphs(
    device: str, hint: str = "leave out --cuda-graphs, or choose a GPU with --device"
) -> None:
    """Raise `UsageError` for a device without CUDA graphs."""
    if torch.device(device).type != "cuda":
        raise UsageError(f"{device} has no CUDA graphs: they need an NVIDIA GPU", hint=hint)


def graph_recorder_for(device: str) -> GraphRecorder:
    """Return the graph recorder of a CUDA device.

    Raises as `require_cuda_graphs` does.
    """
    require_cuda_graphs(device)

    def record(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        with torch.cuda.device(device):
            # Warm up on a side stream, as PyTorch's notes on CUDA graphs require.
            aside, working = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(working)
            with torch.cuda.stream(aside):
                for _ in range(_WARMUPS):
                    run()
            working.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads that pin memory or read files meanwhile do not invalidate the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                made = run()
        return made, graph.replay

    return record
