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
from torch import Tensor

# Absent from builds without oneDNN.
RNN_LAYER: Any = getattr(getattr(torch.ops.aten, "mkldnn_rnn_layer", None), "default", None)

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
    image, *weights, hx, cx = args[:7]
    kinds = (tuple(tensor.shape) for tensor in (image, *weights, hx, cx))
    size = _workspace_bytes(tuple(kinds), image.dtype, args[7], *args[9:15])
    return output, hidden, cell, workspace.new_empty(size)


@functools.lru_cache(256)
def _workspace_bytes(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, reverse: bool, *settings: Any
) -> int:
    """Return the workspace bytes, extrapolated linearly from a few steps."""
    image, *rest = shapes
    steps, hidden = image[0], rest[-1]
    few = math.ceil(_MIN_FIT_BYTES / (_STEP_BYTES * math.prod(hidden)))
    if steps <= 2 * few:
        return _real_workspace_bytes(steps, shapes, dtype, reverse, settings)
    low, high = (
        _real_workspace_bytes(some, shapes, dtype, reverse, settings) for some in (few, 2 * few)
    )
    return high + math.ceil((high - low) / few * (steps - 2 * few))


def _real_workspace_bytes(
    steps: int,
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    reverse: bool,
    settings: tuple[Any, ...],
) -> int:
    """Run a real layer for ``steps`` steps and return the bytes of its workspace."""
    image, *rest = shapes
    # Bypass all dispatch modes: no trace may see this real run.
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.enable_grad():
        inputs = [torch.zeros(shape, dtype=dtype) for shape in ((steps, *image[1:]), *rest)]
        results: list[Tensor] = RNN_LAYER(*inputs, reverse, (), *settings, True)
    return results[3].untyped_storage().nbytes()
