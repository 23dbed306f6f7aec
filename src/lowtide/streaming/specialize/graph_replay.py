"""CUDA-graph replay of a band-by-band run, for repeated images of one shape.

On a fast GPU the kernels of a light model finish before Python has launched the next ones. No
decision of a band-by-band run depends on values, so one CUDA graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowtide.streaming.certificate import tf32_is_allowed
from lowtide.streaming.specialize.cuda_graph import GraphRecording, graph_recorder_for
from lowtide.streaming.specialize.shape_specialized import as_model_error, verify_close
from lowtide.streaming.tolerance import tolerance

HINT = "leave out recorded=True"
# Rows of the longest dim compared at once: the comparison must not need more memory than the run.
_ROWS_PER_COMPARISON = 64


class GraphReplays:
    """CUDA-graph cache of one function: records at the second image of a shape.

    It keeps the graph of the last shape only, since a recording holds the memory of its run.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._recording: GraphRecording | None = None

    def __call__(
        self,
        run: Callable[..., list[Tensor]],
        inputs: Sequence[Tensor],
        depends_on: object = None,
    ) -> list[Tensor]:
        """Return ``run(*inputs)``, replayed from a CUDA graph once one is recorded.

        The first inputs of a shape run plainly, the second are recorded, later ones are replayed. A
        change of shape, strides, dtype, device, TF32 setting or ``depends_on`` drops the recording.

        Args:
            run: Function to record.
            inputs: Its inputs.
            depends_on: Value that the recording depends on.

        Raises:
            ModelError: The run cannot be recorded, or its replay is outside the tolerance.
        """
        facts = ((one.shape, one.stride(), one.dtype, one.device) for one in inputs)
        key = (*facts, tf32_is_allowed(), depends_on)
        if key != self._key:
            self._key, self._recording = key, None
            return run(*inputs)
        if self._recording is not None:
            return self._recording(*inputs)
        expected = run(*inputs)
        device = str(expected[0].device)
        with as_model_error(RuntimeError, "this run cannot be recorded as a CUDA graph", HINT):
            recording = GraphRecording(run, graph_recorder_for(device), *inputs)
            pairs = list(zip(recording.replay(*inputs), expected, strict=True))
            differences = [_max_abs_difference(*pair) for pair in pairs]
        rounding = tolerance(one.dtype for one in inputs)
        for difference, (_, wanted) in zip(differences, pairs, strict=True):
            allowed = rounding * float(wanted.abs().max())
            verify_close(difference, allowed, "recorded run", HINT)
        self._recording = recording
        return expected


def _max_abs_difference(result: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two results, part by part."""
    longest = max(range(result.dim()), key=result.shape.__getitem__, default=0)
    parts = zip(
        torch.atleast_1d(result).split(_ROWS_PER_COMPARISON, longest),
        torch.atleast_1d(other).split(_ROWS_PER_COMPARISON, longest),
        strict=True,
    )
    return float(torch.stack([(one - two).abs().max() for one, two in parts]).max())
