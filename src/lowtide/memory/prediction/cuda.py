"""CUDA memory ledger of a traced run.

Storages are replayed through a simulation of PyTorch's caching allocator. The workspace of
convolutions is a prior, or measured once and cached on a GPU that is present: libraries choose a
convolution's kernel by precision, size and GPU. One kernel converts the image and the result to its
own memory format, which takes as many bytes again; another converts only the image; a third needs
no workspace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.cpu_ops import ONEDNN_LINEAR
from lowtide.core.units import MIB
from lowtide.memory.allocator import SimulatedAllocator, replay_requests
from lowtide.memory.plan import Origin, device_row
from lowtide.memory.plan_store import JsonCacheTable, machine_facts
from lowtide.memory.prediction.calibration import BoundCalibration
from lowtide.memory.prediction.cpu import materialize_call
from lowtide.memory.prediction.operator_costs import (
    Call,
    convolution_rows,
    convolution_with_rows,
    operand_bytes,
    operator_signature,
    receptive_rows,
)
from lowtide.memory.prediction.result import PredictedMemory, live_tensor_rows, margin_row
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.fake_fixes import dense_strides
from lowtide.memory.tracing.trace import MemoryTrace, OpRecord

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
    trace: MemoryTrace,
    profile: DeviceProfile,
    calibration: BoundCalibration,
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


def _replay(trace: MemoryTrace, blas_bytes: int, workspace: ConvWorkspace) -> SimulatedAllocator:
    allocator = SimulatedAllocator()
    events = _events(trace, blas_bytes, workspace)
    replay_requests(itertools.chain(trace.initial.items(), events), allocator)
    return allocator


def _prior_workspace(profile: DeviceProfile, upper: int) -> ConvWorkspace:
    def workspace(call: Call, made: int) -> int:
        channels_last = _is_channels_last(call[1][0])
        known = profile.workspaces.conv_bytes(made, channels_last=channels_last)[upper]
        return known + _image_copy_bytes(call)

    return workspace


def _events(
    trace: MemoryTrace, blas_bytes: int, workspace: ConvWorkspace
) -> Iterator[tuple[int, int]]:
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


def _first_matmuls(trace: MemoryTrace) -> dict[int, bool]:
    """Map each thread's first matrix product to whether it is autograd's thread."""
    first: dict[bool, int] = {}
    for index, op in enumerate(trace.ops):
        if op.call is not None and op.call[0] in _MATMULS:
            first.setdefault(trace.phase(index) == "backward", index)
    return {index: backward for backward, index in first.items()}


# Largest operands and result of a measured convolution: measuring must not take the memory that the
# plan is to save. Libraries have kernels with other workspaces for small images, even for single
# heights of them, but not for larger ones.
_MAX_MEASURED_BYTES = 128 * MIB
# Repeats, of which the least counts: another thread may allocate meanwhile.
_REPEATS = 2


class CudaWorkspaceMeter:
    """Measures the workspace bytes of convolutions on a GPU, once per signature.

    Args:
        device: The GPU.
        store: Cache of what was measured; by default in the package's cache folder.
        measure_allocated: Runs a closure and returns the bytes that it allocates in addition to its
            result; by default read from PyTorch's CUDA allocator.
    """

    def __init__(
        self,
        device: torch.device,
        store: JsonCacheTable | None = None,
        *,
        measure_allocated: Callable[[Callable[[], Tensor]], int] | None = None,
    ) -> None:
        self._device = device
        self.store = store or JsonCacheTable("operators", *machine_facts(str(device)))
        self._measure_allocated = measure_allocated or self._cuda_allocated

    def conv_workspace(self, call: Call, result_bytes: int) -> int:
        """Return the workspace bytes of a convolution, given its ``result_bytes``.

        A large convolution is not run: its workspace is extrapolated linearly in the rows, from
        measurements at two heights, on top of the constant part of its weights.
        """
        rows, least = convolution_rows(call), receptive_rows(call)
        most = max(least, _MAX_MEASURED_BYTES * rows // max(1, operand_bytes(call) + result_bytes))
        if rows <= most:
            return self._measured(call)
        # Powers of two, so that bands of all heights share their measurements.
        high = max(least, 1 << most.bit_length() - 1)
        low = max(least, high // 2)
        low_bytes, high_bytes = (
            self._measured(convolution_with_rows(call, some)) for some in (low, high)
        )
        if low == high:
            return math.ceil(high_bytes * rows / high)
        return max(
            0, math.ceil(high_bytes + (high_bytes - low_bytes) * (rows - high) / (high - low))
        )

    def _measured(self, call: Call) -> int:
        key = f"card {operator_signature(call)} {convolution_settings()}"
        known = self.store.get(key)
        if known is None:
            run = materialize_call(call, self._device)
            with torch.inference_mode():
                run()  # what a library keeps from its first call on is no workspace
                known = min(self._measure_allocated(run) for _ in range(_REPEATS))
            self.store.put(key, known)
        return known

    def _cuda_allocated(self, run: Callable[[], Tensor]) -> int:
        # The cumulative total, since resetting the peak would disturb whoever else reads it.
        before = _total_allocated_bytes(self._device)
        result = run()
        return max(0, _total_allocated_bytes(self._device) - before - result.nbytes)


def convolution_settings() -> str:
    """Return the cuDNN version and settings that decide a convolution's kernel."""
    cudnn: Any = torch.backends.cudnn
    settings = cudnn.enabled, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    return f"{cudnn.version()} {''.join(str(int(setting)) for setting in settings)}"


def _total_allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
