"""What convolutions take for themselves on a card that is there: measured once each, then kept.

Libraries choose a convolution's kernel by precision, size and card: one converts its image and its
result to the order of channels that it wants, in as many bytes again, one only its image, and
another needs nothing.
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

# Operands and result of what is measured: a plan may not take what it is to save. Libraries have
# kernels of other needs for small images, even for single heights of them, but not for larger ones.
_AT_ONCE = 128 * MIB
# Another thread may take memory meanwhile.
_TIMES = 2


class CudaWorkspace:
    """Measures convolutions on ``device``, each signature once, kept in a store.

    ``taken`` tells what a run allocates beside its result; by default a card's allocator does.
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
        """Bytes that a convolution takes beside its result of ``made`` bytes.

        Of a large one they are taken to grow by the row, as from one to the other of two heights
        that are measured, beside what weights take once.
        """
        rows, least = row_count(call), rows_seen(call)
        most = max(least, _AT_ONCE * rows // max(1, operand_bytes(call) + made))
        if rows <= most:
            return self._measured(call)
        # Powers of two, so that they are the same for all heights of bands.
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
                run()  # what a library keeps from then on is no scratch
                known = min(self._taken(run) for _ in range(_TIMES))
            self.store.put(key, known)
        return known

    def _by_the_allocator(self, run: Callable[[], Tensor]) -> int:
        # A sum of all that was ever handed out: the peak is somebody else's to restart.
        before = _handed_out(self._device)
        result = run()
        return max(0, _handed_out(self._device) - before - result.nbytes)


def convolution_settings() -> str:
    """What of PyTorch's settings decides which kernel a convolution gets."""
    cudnn: Any = torch.backends.cudnn
    settings = cudnn.enabled, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    return f"{cudnn.version()} {''.join(str(int(setting)) for setting in settings)}"


def _handed_out(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
