"""Resident memory of a run: what is kept within the budget."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lowtide.memory.meter import CudaMemoryMeter, HostMemoryMeter
from lowtide.memory.oom import HeapLimiter
from lowtide.memory.plan import Plan
from lowtide.streaming.tiles.network import RunnableNetwork

if TYPE_CHECKING:
    from torch import nn

# A look at the resident memory takes up to 0.15 ms. Layers that take less time than this leave few
# blocks; before each at every look was 4 to 7 % of the time of small tiles.
_LOOK_SECONDS = 0.01


class RunMemoryLimiter:
    """Resident memory of a run, of which ``other_bytes`` are not in its plan.

    Tiles fit the free blocks that tiles leave in the heap, mostly: equal runs of equal tiles took
    up to twice the expected bytes, by where in the heap small blocks happened to lie. Bands differ
    in size, and over hundreds of them the heap would keep several times the live bytes. So the heap
    is trimmed above a limit: for tiles halfway from the expected bytes to their bound.
    """

    def __init__(
        self,
        meter: HostMemoryMeter | CudaMemoryMeter,
        plan: Plan,
        budget_bytes: int,
        other_bytes: int,
    ) -> None:
        self._budget = budget_bytes
        banded = plan.strategy.name == "streamed"
        halfway = (plan.predicted_bytes + plan.upper_bytes) // 2
        expected = plan.predicted_bytes if banded else halfway
        self._limit = HeapLimiter(lambda: meter.current_bytes, other_bytes + expected, plan.device)
        special = banded or plan.is_specialized or plan.strategy.device_count > 1
        self._looked = -math.inf
        self._in_layers = plan.device == "cpu" and not special

    def make_room(self, new_bytes: int) -> int:
        """Return the resident bytes plus ``new_bytes``, after trimming the heap if needed."""
        return self._limit.make_room(new_bytes)

    def over_budget(self) -> bool:
        """Return whether the resident bytes exceed the budget."""
        return self.make_room(0) > self._budget

    @contextlib.contextmanager
    def limited(self, network: RunnableNetwork) -> Iterator[None]:
        """Keep the limit before each layer of ``network`` too, in calls inside the block.

        Where it computes in whole tiles, by PyTorch and in this process's heap; elsewhere nothing
        is done.
        """
        hooks = []
        if self._in_layers and network.runtime == "torch" and network.free_memory is None:
            hooks = [
                layer.register_forward_pre_hook(lambda *_call: self._before_layer())
                for layer in _layers(network.forward)
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_layer(self) -> None:
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self.make_room(0)
            self._looked = time.monotonic()


def _layers(module: Any) -> Iterator[nn.Module]:
    """Yield the innermost modules of a network whose results do not depend on hooks."""
    from torch import nn

    # With hooks in it, PyTorch computes this one by other kernels, which round differently.
    if isinstance(module, nn.TransformerEncoderLayer):
        return
    parts = list(module.children())
    if not parts:
        yield module
    for part in parts:
        yield from _layers(part)
