"""What a run leaves in the process beside its tensors: compiled kernels and objects.

oneDNN compiles a kernel for each size and type of a convolution or a matrix product and keeps it;
autograd keeps objects for every result that a backward pass will need. Neither is a tensor, and
together they are a few percent of a small run.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from lowtide.memory.tracing.trace import TensorFacts, Trace

_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
# In fp32 these go to the BLAS library, which compiles nothing.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_LOW = (torch.bfloat16, torch.float16)


class Objects(BaseModel):
    """Counts of a run: different convolutions in fp32 and in lower precision, different products
    in lower precision, and storages alive at its peak."""

    model_config = ConfigDict(frozen=True)

    convolutions: int
    low_convolutions: int
    low_products: int
    storages: int


class RuntimeCosts(BaseModel):
    """Bytes for one of each, fitted to runs by a committed script."""

    model_config = ConfigDict(frozen=True)

    convolution_bytes: int
    low_convolution_bytes: int
    low_product_bytes: int
    storage_bytes: int

    def of(self, objects: Objects) -> int:
        """Bytes for all of them."""
        return (
            objects.convolutions * self.convolution_bytes
            + objects.low_convolutions * self.low_convolution_bytes
            + objects.low_products * self.low_product_bytes
            + objects.storages * self.storage_bytes
        )


def count_objects(trace: Trace, op: int) -> Objects:
    """What a run on the CPU has made beside tensors by its peak, at operator ``op``.

    A training step repeats, so that its kernels are there from the step before.
    """
    repeats = any(phase == "backward" for _, phase in trace.marks)
    found: dict[str, set[tuple[Any, ...]]] = {"": set(), "low": set(), "products": set()}
    for made in trace.ops if repeats else trace.ops[: op + 1]:
        if made.call is None:
            continue
        name = made.call[0].overloadpacket.__name__
        tensors = tuple(arg for arg in made.call[1] if isinstance(arg, TensorFacts))
        low = any(facts.dtype in _LOW for facts in tensors)
        if name in _CONVOLUTIONS:
            found["low" if low else ""].add((name, tensors))
        elif low and name in _PRODUCTS:
            found["products"].add((name, tensors))
    return Objects(
        convolutions=len(found[""]), low_convolutions=len(found["low"]),
        low_products=len(found["products"]), storages=len(trace.sizes_during(op)),
    )  # fmt: skip
