"""CUDA memory ledger of a traced run.

Storages are replayed through a simulation of PyTorch's caching allocator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.attention.cpu_ops import ONEDNN_LINEAR
from lowtide.memory.ledger import Origin, device_row
from lowtide.memory.prediction.calibration import Calibration
from lowtide.memory.prediction.op_signature import Call
from lowtide.memory.prediction.result import PredictedMemory, live_tensor_rows, margin_row
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.simulation.allocator import CachingAllocator, replay_requests
from lowtide.memory.tracing.fake_strides import dense_strides
from lowtide.memory.tracing.trace import OpRecord, Trace

_MATMULS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        ONEDNN_LINEAR,
    }
) - {None}
_CONVOLUTIONS = frozenset(
    {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
)
# Ids of storages that no trace has: the BLAS workspace that a thread keeps from its first matrix
# product on (False: the step's thread, True: autograd's, which runs backward passes on CUDA),
# the workspace of a convolution, and the copy of its image.
_BLAS = {False: -1, True: -3}
_CONV_WORKSPACE, _IMAGE_COPY = -2, -4
# Workspace bytes of a convolution, given its call and the bytes of its result.
ConvWorkspace = Callable[[Call, int], int]


def predict_cuda(
    trace: Trace,
    profile: DeviceProfile,
    calibration: Calibration,
    workspace: ConvWorkspace | None = None,
) -> PredictedMemory:
    """Predict the memory of ``trace`` on a CUDA device: reserved bytes and context.

    Args:
        trace: A trace made with ``keep_calls``.
        profile: The device, which need not be present.
        calibration: Upper bound of the prediction.
        workspace: Workspace bytes of a convolution, given its call and the bytes of its result; by
            default the profile's prior.
    """
    expected, upper = (
        _replay(trace, blas, workspace or _prior_workspace(profile, upper))
        for upper, blas in enumerate(profile.workspaces.blas_bytes)
    )
    peak_op = trace.peak_op()
    rows = live_tensor_rows(trace, None)
    live = sum(row.value for row in rows)
    threads = len(_first_matmuls(trace))
    blas = [threads * size for size in profile.workspaces.blas_bytes]
    extra, most = (max(run.peak_allocated - live, 0) for run in (expected, upper))
    origin: Origin = "prior" if workspace is None else "probed"
    rows.append(device_row("workspace", max(extra, blas[0]), origin, max(most, blas[1])))
    known = sum(row.value for row in rows), sum(row.upper for row in rows)
    gaps = [
        max(0, run.peak_reserved - own) for run, own in zip((expected, upper), known, strict=True)
    ]
    rows.append(device_row("allocator", gaps[0], "simulated", gaps[1]))
    rows.append(device_row("context", profile.context_bytes, "prior", profile.context_upper_bytes))
    predicted = sum(row.value for row in rows)
    rows.append(margin_row(rows, max(calibration.upper(predicted), sum(r.upper for r in rows))))
    name = trace.ops[peak_op].name if peak_op < len(trace.ops) else ""
    return PredictedMemory(tuple(rows), trace.phase(peak_op), name, trace.peak_bytes)


def _replay(trace: Trace, blas_bytes: int, workspace: ConvWorkspace) -> CachingAllocator:
    allocator = CachingAllocator()
    events = _events(trace, blas_bytes, workspace)
    replay_requests(itertools.chain(trace.initial.items(), events), allocator)
    return allocator


def _prior_workspace(profile: DeviceProfile, upper: int) -> ConvWorkspace:
    def workspace(call: Call, made: int) -> int:
        channels_last = _is_channels_last(call[1][0])
        known = profile.workspaces.conv_bytes(made, channels_last=channels_last)[upper]
        return known + _image_copy_bytes(call)

    return workspace


def _events(trace: Trace, blas_bytes: int, workspace: ConvWorkspace) -> Iterator[tuple[int, int]]:
    """Yield allocations and releases as `replay_requests` takes them, workspaces included.

    Workspaces of matrix products stay. A convolution takes its workspace once its result exists,
    except for the copy of an image in an unsupported memory format, made before the result.
    """
    done, copies, first = 0, dict[int, int](), _first_matmuls(trace)
    for event in (*trace.events, None):
        until = len(trace.ops) if event is None else event.op
        for index, op in enumerate(trace.ops[done:until], done):
            if (backward := first.get(index)) is not None:
                yield _BLAS[backward], blas_bytes
            copied = copies.pop(index, 0)
            if op.call and op.call[0] in _CONVOLUTIONS:
                rest = workspace(op.call, op.result_bytes) - copied
                yield from ((_CONV_WORKSPACE, rest), (_CONV_WORKSPACE, -rest)) if rest else ()
            if copied:
                yield _IMAGE_COPY, -copied
        done = max(done, until)
        if event is None or not event.size:
            continue
        if event.size > 0 and until not in copies and until < len(trace.ops):
            copies[until] = _copied_before_result(trace.ops[until], workspace)
            if copies[until]:
                yield _IMAGE_COPY, copies[until]
        yield event.storage, event.size


def _copied_before_result(op: OpRecord, workspace: ConvWorkspace) -> int:
    """Return the part of a convolution's workspace that copies its image beforehand."""
    if op.call is None or op.call[0] is not torch.ops.aten.convolution.default:
        return 0
    size = _image_copy_bytes(op.call)
    return min(size, workspace(op.call, op.result_bytes)) if size else 0


def _image_copy_bytes(call: Call) -> int:
    """Return the bytes of a convolution's image if PyTorch copies it, otherwise 0.

    It copies an image with gaps, or with strides that are neither contiguous nor channels-last. The
    batch stride must be the largest, even for a batch of one.
    """
    image, weight = call[1][:2]
    channels_last = _suggests_channels_last(image) or _suggests_channels_last(weight)
    order = (1, 3, 2, 0) if channels_last else range(len(image.shape))[::-1]
    dense = dense_strides(image.shape, order)
    strides = zip(image.shape, image.stride, dense, strict=True)
    fits = all(side == 1 or stride == expected for side, stride, expected in strides)
    return 0 if fits else math.prod(image.shape) * image.dtype.itemsize


def _suggests_channels_last(facts: Any) -> bool:
    """Evaluate ``c10::is_channels_last_strides_2d`` of pytorch/pytorch."""
    if len(facts.shape) != 4:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        stride = facts.stride[dim]
        if not facts.shape[dim] or stride < least or (dim == 0 and least == facts.stride[1]):
            return False
        least = stride * facts.shape[dim]
    return True


def _is_channels_last(facts: Any) -> bool:
    return len(facts.stride) == 4 and facts.stride[1] == 1 and facts.shape[1] > 1


def _first_matmuls(trace: Trace) -> dict[int, bool]:
    """Map each thread's first matrix product to whether it is autograd's thread."""
    first: dict[bool, int] = {}
    for index, op in enumerate(trace.ops):
        if op.call is not None and op.call[0] in _MATMULS:
            first.setdefault(trace.phase(index) == "backward", index)
    return {index: backward for backward, index in first.items()}
