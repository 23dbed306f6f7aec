"""Workspace that oneDNN's recurrent layers keep for the backward pass.

It is a result of the operator, as large as all states and gates of all steps. PyTorch's rule for
fake results leaves it empty, so that estimates would miss it, and a backward pass that is measured
with an empty one would read beyond its end.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.core.heap import small_pages, trim_heap, trimming_heap
from lowtide.memory.process_memory import resident_share
from lowtide.memory.tracing.trace import Trace

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
    with _untraced():
        results = RNN_LAYER(*_inputs(steps, shapes, dtype), reverse, (), *settings, True)
    return results[3].untyped_storage().nbytes()


def unwritten_bytes(trace: Trace, op: int, below: float = math.inf) -> int:
    """Return the bytes of workspaces alive at operator ``op`` that nobody has written by then.

    Pages that nobody writes are not resident. Only those of workspaces of less than ``below`` bytes
    count. The operator may be a layer's backward pass, which
    writes more of its own workspace, the last one made.
    """
    calls = [record.call for record in trace.ops]
    made: dict[int, Any] = {}
    for event in trace.events:
        call = calls[event.op] if event.op < min(op, len(calls)) else None
        if event.size < 0 and event.op <= op:
            made.pop(event.storage, None)
        elif call is not None and call[0] is RNN_LAYER and event.size == _traced_bytes(call):
            made[event.storage] = call
    total = 0
    for storage, call in made.items():
        if _traced_bytes(call) >= below:
            continue
        after_layer, after_backward = _written_shares(*_layer(call))
        last = storage == max(made) and op < len(calls) and _is_backward(calls[op])
        total += int(_traced_bytes(call) * (1 - (after_backward if last else after_layer)))
    return total


def _is_backward(call: Any) -> bool:
    return call is not None and call[0] is RNN_LAYER_BACKWARD


def _layer(call: Any) -> tuple[Any, ...]:
    """Return the arguments of `_workspace_bytes` for a traced call."""
    image, *weights, hx, cx = call[1][:7]
    shapes = tuple(tuple(facts.shape) for facts in (image, *weights, hx, cx))
    return shapes, image.dtype, call[1][7], *call[1][9:15]


def _traced_bytes(call: Any) -> int:
    return _workspace_bytes(*_layer(call))


@functools.lru_cache(256)
def _written_shares(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, reverse: bool, *settings: Any
) -> tuple[float, float]:
    """Return the shares of a workspace written by the layer, and with its backward pass."""
    image, *rest = shapes
    few = math.ceil(_MIN_FIT_BYTES / (_STEP_BYTES * math.prod(rest[-1])))
    inputs = _inputs(min(image[0], few), shapes, dtype)
    # Blocks that the heap reuses are resident already, and so are the rest of huge pages.
    trim_heap()
    with _untraced(), trimming_heap(), small_pages():
        output, hidden, cell, workspace = RNN_LAYER(*inputs, reverse, (), *settings, True)
        forward = _resident_share(workspace)
        made = torch.zeros_like(output), torch.zeros_like(hidden), torch.zeros_like(cell)
        mode, size, layers, biases, both_ways, batch_first = settings
        RNN_LAYER_BACKWARD(
            *(*inputs, output, hidden, cell, *made, reverse, mode, size, layers, biases, True),
            *(both_ways, (), batch_first, workspace),
        )
        return forward, max(forward, _resident_share(workspace))


def _resident_share(workspace: Tensor) -> float:
    return resident_share(workspace.data_ptr(), workspace.untyped_storage().nbytes())


def _inputs(steps: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    image, *rest = shapes
    return [torch.zeros(shape, dtype=dtype) for shape in ((steps, *image[1:]), *rest)]


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Bypass all dispatch modes: no trace may see a real run."""
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.enable_grad():
        yield
