"""Workspace that oneDNN's recurrent layers keep for the backward pass.

It is a result of the operator, as large as all states and gates of all steps. PyTorch's rule for
fake results leaves it empty, so that estimates would miss it, and a backward pass that is measured
with an empty one would read beyond its end.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

# Absent from builds without oneDNN.
RNN_LAYER: Any = getattr(getattr(torch.ops.aten, "mkldnn_rnn_layer", None), "default", None)
RNN_LAYER_BACKWARD: Any = getattr(
    getattr(torch.ops.aten, "mkldnn_rnn_layer_backward", None), "default", None
)

# Enough bytes for a linear fit: parts of the workspace are whole pages, which a few steps of small
# layers do not fill.
_MIN_FIT_BYTES = 4 << 20
_STEP_BYTES = 32  # approximate bytes per element of a step's states and gates


def with_rnn_workspace(args: tuple[Any, ...], result: Any) -> Any:
    """Return the fake result of `RNN_LAYER` with a workspace of its real size.

    There is a workspace wherever gradients are enabled.
    """
    output, hidden, cell, workspace = result
    if not torch.is_grad_enabled() or not hasattr(workspace, "fake_mode"):
        return result
    image, *others = args[:7]
    shapes = tuple(tuple(tensor.shape) for tensor in others)
    size = _workspace_bytes(tuple(image.shape), shapes, image.dtype, args[7], *args[9:15])
    return output, hidden, cell, workspace.new_empty(size)


@functools.lru_cache(256)
def _workspace_bytes(
    image: tuple[int, ...],
    others: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    reverse: bool,
    *settings: Any,
) -> int:
    """Return the workspace bytes of a real layer, extrapolated linearly from a few steps.

    Half of them or less may never be written, and so not be resident; they count all the same.
    """

    def run(steps: int) -> int:
        shapes = (steps, *image[1:]), *others
        # Bypasses all dispatch modes: no trace may see a real run.
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.enable_grad():
            inputs = [torch.zeros(shape, dtype=dtype) for shape in shapes]
            workspace = RNN_LAYER(*inputs, reverse, (), *settings, True)[3]
        return workspace.untyped_storage().nbytes()

    steps, few = image[0], math.ceil(_MIN_FIT_BYTES / (_STEP_BYTES * math.prod(others[-1])))
    if steps <= 2 * few:
        return run(steps)
    low, high = run(few), run(2 * few)
    return high + math.ceil((high - low) / few * (steps - 2 * few))
