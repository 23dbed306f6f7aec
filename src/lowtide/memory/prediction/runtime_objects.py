"""Memory of a CPU run beyond its tensors: compiled kernels and objects.

oneDNN compiles a kernel for each size and type of a convolution or a matrix product and keeps it;
autograd keeps objects for every result that a backward pass will need. Neither is a tensor, and
together they are a few percent of a small run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from lowtide.attention.cpu_ops import ONEDNN_LINEAR
from lowtide.memory.tracing.trace import TensorFacts, Trace

_CONVOLUTION, _BACKWARD = "convolution", "convolution_backward"
# In fp32 the BLAS library runs these and compiles nothing; `ONEDNN_LINEAR` runs in oneDNN.
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class RuntimeObjects(BaseModel):
    """Counts of the compiled kernels and storages of a CPU run.

    Attributes:
        convolutions: Different fp32 convolutions.
        backward_convolutions: Different backward passes of fp32 convolutions.
        low_convolutions: Different convolutions and backward passes in bf16 or fp16.
        products: Different matrix products by oneDNN: those in bf16 or fp16, and linear layers that
            are passed to it.
        storages: Storages alive at the peak.
    """

    model_config = ConfigDict(frozen=True)

    convolutions: int
    backward_convolutions: int
    low_convolutions: int
    products: int
    storages: int


class RuntimeCosts(BaseModel):
    """Bytes per compiled kernel and storage, fitted to runs by a committed script."""

    model_config = ConfigDict(frozen=True)

    convolution_bytes: int
    backward_convolution_bytes: int
    low_convolution_bytes: int
    product_bytes: int
    storage_bytes: int

    def total_bytes(self, objects: RuntimeObjects) -> int:
        """Return the total bytes of ``objects``."""
        return (
            objects.convolutions * self.convolution_bytes
            + objects.backward_convolutions * self.backward_convolution_bytes
            + objects.low_convolutions * self.low_convolution_bytes
            + objects.products * self.product_bytes
            + objects.storages * self.storage_bytes
        )


def count_runtime_objects(trace: Trace, op: int) -> RuntimeObjects:
    """Count the kernels and storages of a CPU run by its peak, at operator ``op``.

    A training step repeats, so its kernels exist from the step before and all of them count.
    """
    found: dict[str, set[tuple[Any, ...]]] = {
        "convolutions": set(),
        "backward_convolutions": set(),
        "low_convolutions": set(),
        "products": set(),
    }
    for record in trace.ops if trace.has_backward else trace.ops[: op + 1]:
        if record.call is None:
            continue
        function, tensors = (
            record.call[0],
            tuple(arg for arg in record.call[1] if isinstance(arg, TensorFacts)),
        )
        if (kind := _counted_as(function, tensors)) is not None:
            found[kind].add((function, _kernel_key(record.call, tensors)))
    counts = {kind: len(different) for kind, different in found.items()}
    return RuntimeObjects(**counts, storages=len(trace.sizes_during(op)))


def _kernel_key(call: tuple[Any, ...], tensors: tuple[TensorFacts, ...]) -> tuple[Any, ...]:
    """Return the key for which oneDNN compiles one kernel.

    That of a linear layer depends on its token count, not on their layout, and on the operation
    fused to its result.
    """
    function, arguments = call[:2]
    if function is not ONEDNN_LINEAR:
        return tensors
    (x, weight), fused = tensors[:2], arguments[3]
    return math.prod(x.shape[:-1]), *weight.shape, fused


def _counted_as(function: Any, tensors: tuple[TensorFacts, ...]) -> str | None:
    """Return the `RuntimeObjects` field that an operator adds to, or None."""
    name = function.overloadpacket.__name__
    low = any(facts.dtype in _LOW_PRECISION for facts in tensors)
    if name in (_CONVOLUTION, _BACKWARD):
        if low:
            return "low_convolutions"
        return "convolutions" if name == _CONVOLUTION else "backward_convolutions"
    by_onednn = function is ONEDNN_LINEAR or (low and name in _MATMULS)
    return "products" if by_onednn else None
