"""A run by bands whose kernels a card is told of once, and then starts by itself.

A step of a light model is over on a fast card sooner than Python has issued the next. Nothing of
a run by bands is decided by values, so that all of it can be one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.streaming.certificate import tf32_is_allowed
from lowtide.streaming.specialize.cuda_graph import GraphRecording, graph_recorder_for
from lowtide.streaming.specialize.shape_specialized import as_model_error, verify_close
from lowtide.streaming.tolerance import tolerance

HINT = "leave out recorded=True"
# Results are compared so many rows at a time, or the comparison would take more than the run.
_ROWS = 64


class GraphReplays:
    """Calls of one function that are recorded from the second image of a size on.

    Only the last size is kept: a recording holds what its run takes.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._kept: GraphRecording | None = None

    def __call__(self, run: Callable[[Tensor], Tensor], image: Tensor, of: object = None) -> Tensor:
        """As ``run``, which is ``of`` something that a recording lasts as long as. Raises
        `ModelError` where the run cannot be recorded, or differs so."""
        key = (image.shape, image.stride(), image.dtype, image.device, tf32_is_allowed(), of)
        if key != self._key:
            self._key, self._kept = key, None
            return run(image)
        if self._kept is not None:
            return self._kept(image)
        expected = run(image)
        with as_model_error(RuntimeError, "this run cannot be recorded as a CUDA graph", HINT):
            kept = GraphRecording(run, image, graph_recorder_for(str(image.device)))
            apart = _apart(kept.in_place(image), expected)
        allowed = tolerance([image.dtype]) * float(expected.abs().max())
        verify_close(apart, allowed, "recorded run", HINT)
        self._kept = kept
        return expected


def _apart(result: Tensor, other: Tensor) -> float:
    parts = zip(result.split(_ROWS, 2), other.split(_ROWS, 2), strict=True)
    return float(torch.stack([(one - two).abs().max() for one, two in parts]).max())
