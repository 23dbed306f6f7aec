"""What a run leaves in the process beside its tensors: compiled kernels and objects.

oneDNN compiles a kernel for each size and type of a convolution or a matrix product and keeps it;
autograd keeps objects for every result that a backward pass will need. Neither is a tensor, and
together they are a few percent of a small run.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from lowtide.memory.trace import TensorFacts, Trace

_COMPILED = frozenset({"convolution", "convolution_backward"})
# In fp32 these go to the BLAS library, which compiles nothing.
_COMPILED_IN_LOW_PRECISION = _COMPILED | {"mm", "addmm", "bmm", "baddbmm"}
_LOW = (torch.bfloat16, torch.float16)


class Objects(BaseModel):
    """Counts of a run: kernels of its own sizes in fp32 and below, storages alive at its peak."""

    model_config = ConfigDict(frozen=True)

    kernels: int
    low_kernels: int
    storages: int


class RuntimeCosts(BaseModel):
    """Bytes for one of each, fitted to runs by a committed script."""

    model_config = ConfigDict(frozen=True)

    kernel_bytes: int
    low_kernel_bytes: int
    storage_bytes: int

    def of(self, objects: Objects) -> int:
        """Bytes for all of them."""
        return (
            objects.kernels * self.kernel_bytes
            + objects.low_kernels * self.low_kernel_bytes
            + objects.storages * self.storage_bytes
        )


def count_objects(trace: Trace, op: int) -> Objects:
    """What a run on the CPU makes beside tensors, with the peak at operator ``op``."""
    kernels: set[tuple[Any, ...]] = set()
    low_kernels: set[tuple[Any, ...]] = set()
    for made in trace.ops:
        if made.call is None:
            continue
        name = made.call[0].overloadpacket.__name__
        tensors = tuple(arg for arg in made.call[1] if isinstance(arg, TensorFacts))
        if any(facts.dtype in _LOW for facts in tensors):
            if name in _COMPILED_IN_LOW_PRECISION:
                low_kernels.add((name, tensors))
        elif name in _COMPILED:
            kernels.add((name, tensors))
    return Objects(
        kernels=len(kernels), low_kernels=len(low_kernels), storages=len(trace.sizes_during(op))
    )
