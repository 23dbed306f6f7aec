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
from lowtide.memory.cache import WorkspaceStore, cache_folder
from lowtide.memory.prediction.cpu_workspace import materialize_call
from lowtide.memory.prediction.op_signature import (
    Call,
    operand_bytes,
    row_count,
    rows_seen,
    signature,
    with_rows,
)

# Largest operands and result of a measured convolution: measuring must not take the memory that the
# plan is to save. Libraries have kernels with other workspaces for small images, even for single
# heights of them, but not for larger ones.
_AT_ONCE = 128 * MIB
# Repeats, of which the least counts: another thread may allocate meanwhile.
_TIMES = 2


class CudaWorkspace:
    """Measures the workspace bytes of convolutions on a GPU, once per signature.

    Args:
        device: The GPU.
        store: Cache of what was measured; by default in the package's cache folder.
        taken: Runs a closure and returns the bytes that it allocates in addition to its result; by
            default read from PyTorch's CUDA allocator.
    """

    def __init__(
        self,
        device: torch.device,
        store: WorkspaceStore | None = None,
        *,
        taken: Callable[[Callable[[], Tensor]], int] | None = None,
    ) -> None:
        self._device = device
        self.store = store or WorkspaceStore(cache_folder(), device=str(device))
        self._taken = taken or self._by_the_allocator

    def of(self, call: Call, made: int) -> int:
        """Return the workspace bytes of a convolution with a result of ``made`` bytes.

        A large convolution is not run: its workspace is extrapolated linearly in the rows, from
        measurements at two heights, on top of the constant part of its weights.
        """
        rows, least = row_count(call), rows_seen(call)
        most = max(least, _AT_ONCE * rows // max(1, operand_bytes(call) + made))
        if rows <= most:
            return self._measured(call)
        # Powers of two, so that bands of all heights share their measurements.
        high = max(least, 1 << most.bit_length() - 1)
        low = max(least, high // 2)
        fewer, taken = (self._measured(with_rows(call, some)) for some in (low, high))
        if low == high:
            return math.ceil(taken * rows / high)
        return max(0, math.ceil(taken + (taken - fewer) * (rows - high) / (high - low)))

    def _measured(self, few: Call) -> int:
        key = f"card {signature(few)} {convolution_settings()}"
        known = self.store.get(key)
        if known is None:
            run = materialize_call(few, self._device)
            with torch.inference_mode():
                run()  # what a library keeps from its first call on is no workspace
                known = min(self._taken(run) for _ in range(_TIMES))
            self.store.put(key, known)
        return known

    def _by_the_allocator(self, run: Callable[[], Tensor]) -> int:
        # The cumulative total, since resetting the peak would disturb whoever else reads it.
        before = _handed_out(self._device)
        result = run()
        return max(0, _handed_out(self._device) - before - result.nbytes)


def convolution_settings() -> str:
    """Return the cuDNN version and settings that decide a convolution's kernel."""
    cudnn: Any = torch.backends.cudnn
    settings = cudnn.enabled, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    return f"{cudnn.version()} {''.join(str(int(setting)) for setting in settings)}"


def _handed_out(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
