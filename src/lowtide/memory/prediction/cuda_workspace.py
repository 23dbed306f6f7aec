"""Workspace of convolutions on a GPU that is present, measured once and cached.

Libraries choose a convolution's kernel by precision, size and GPU. One kernel converts the image
and the result to its own memory format, which takes as many bytes again; another converts only
the image; a third needs no workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.core.units import MIB
from lowtide.memory.plan_store import StoredTable, machine
from lowtide.memory.prediction.cpu_workspace import materialize_call
from lowtide.memory.prediction.op_signature import (
    Call,
    operand_bytes,
    receptive_rows,
    row_count,
    signature,
    with_rows,
)

# Largest operands and result of a measured convolution: measuring must not take the memory that the
# plan is to save. Libraries have kernels with other workspaces for small images, even for single
# heights of them, but not for larger ones.
_MAX_MEASURED_BYTES = 128 * MIB
# Repeats, of which the least counts: another thread may allocate meanwhile.
_REPEATS = 2


class CudaWorkspace:
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
        store: StoredTable | None = None,
        *,
        measure_allocated: Callable[[Callable[[], Tensor]], int] | None = None,
    ) -> None:
        self._device = device
        self.store = store or StoredTable("operators", *machine(str(device)))
        self._measure_allocated = measure_allocated or self._cuda_allocated

    def conv_workspace(self, call: Call, result_bytes: int) -> int:
        """Return the workspace bytes of a convolution, given its ``result_bytes``.

        A large convolution is not run: its workspace is extrapolated linearly in the rows, from
        measurements at two heights, on top of the constant part of its weights.
        """
        rows, least = row_count(call), receptive_rows(call)
        most = max(least, _MAX_MEASURED_BYTES * rows // max(1, operand_bytes(call) + result_bytes))
        if rows <= most:
            return self._measured(call)
        # Powers of two, so that bands of all heights share their measurements.
        high = max(least, 1 << most.bit_length() - 1)
        low = max(least, high // 2)
        low_bytes, high_bytes = (self._measured(with_rows(call, some)) for some in (low, high))
        if low == high:
            return math.ceil(high_bytes * rows / high)
        return max(
            0, math.ceil(high_bytes + (high_bytes - low_bytes) * (rows - high) / (high - low))
        )

    def _measured(self, call: Call) -> int:
        key = f"card {signature(call)} {convolution_settings()}"
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
