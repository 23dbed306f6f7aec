"""A network whose kernels a card is told of once, for one shape of input, and starts by itself.

A light network in small tiles is over sooner than Python has issued the next operator. A CUDA
graph (CUDA C++ Programming Guide, "CUDA Graphs") has them all. It reads and writes where it did
when it was recorded: what it is given is copied there, and its result is copied away before the
next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.streaming.specialize.shape_specialized import (
    SpecializationGain,
    as_model_error,
    specialize,
)
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Before recording: libraries set themselves up in the first runs, which no recording may contain.
_WARMUPS = 3


class GraphRecorder(Protocol):
    """Records a call on a device."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """The result's place, and what computes it there anew."""
        ...


class GraphRecording:
    """One recorded run of a network, for inputs of the shape and order of ``images``.

    Holds what the run takes, for as long as it lives. Calls have to be made on one stream, which
    keeps them apart.
    """

    def __init__(
        self, plain: Callable[[Tensor], Tensor], images: Tensor, record: GraphRecorder
    ) -> None:
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._given = images.clone(memory_format=torch.preserve_format)
        self._made, self._replay = record(lambda: plain(self._given))

    def __call__(self, images: Tensor) -> Tensor:
        """As the network itself."""
        return self.in_place(images).clone(memory_format=torch.preserve_format)

    def in_place(self, images: Tensor) -> Tensor:
        """The same where the next call overwrites it."""
        self._given.copy_(images)
        self._replay()
        return self._made


def cuda_graph_for(
    network: NetworkSpec, shape: tuple[int, ...], record: GraphRecorder | None = None
) -> tuple[NetworkSpec, SpecializationGain]:
    """``network`` recorded for inputs of ``shape``, and what that took and gains.

    Accuracy: exact up to rounding, compared on random numbers. ``record`` is by default that of
    CUDA. Raises `ModelError` where the network cannot be recorded, as one that asks the host for
    values on its way, or the result differs, and `UsageError` on a device that has no graphs.
    """
    on_device = record or graph_recorder_for(network.device)

    def make(plain: nn.Module, images: Tensor) -> tuple[GraphRecording, Tensor]:
        says = "this network cannot be recorded as a CUDA graph"
        with as_model_error(RuntimeError, says, "leave out --cuda-graphs"):
            recording = GraphRecording(plain, images, on_device)
            return recording, recording(images)

    return specialize(network, shape, make, "recorded")


def require_cuda_graphs(
    device: str, hint: str = "leave out --cuda-graphs, or choose a card by --device"
) -> None:
    """Raise `UsageError` for a device without CUDA graphs."""
    if torch.device(device).type != "cuda":
        raise UsageError(f"{device} has no CUDA graphs: they are of NVIDIA cards", hint=hint)


def graph_recorder_for(device: str) -> GraphRecorder:
    """What records on an NVIDIA card; raises as `require_cuda_graphs` does."""
    require_cuda_graphs(device)

    def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        with torch.cuda.device(device):
            # On a stream of its own, as recording is: PyTorch's notes on CUDA graphs want it so.
            aside, working = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(working)
            with torch.cuda.stream(aside):
                for _ in range(_WARMUPS):
                    run()
            working.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads, that lock pages or read files meanwhile, do not spoil it.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                made = run()
        return made, graph.replay

    return record
