"""Plans that stream all there is, and runs to compare."""

import torch

from lowtide.memory.offload.offload_plan import OffloadPlan
from lowtide.memory.offload.weight_blocks import find_blocks
from support.offloaded_models import inputs


def plan_all(model, *, in_flight=2, split_layers=False, resident=()):
    """Stream everything that can be, in the smallest pieces."""
    blocks = find_blocks(model, largest_bytes=0, split_layers=split_layers, resident=resident)
    return OffloadPlan(
        resident=tuple(block for block in blocks if not block.modules),
        streamed=tuple(block for block in blocks if block.modules),
        in_flight=in_flight,
        budget_bytes=0,
    )


def run(model, count=1):
    with torch.inference_mode():
        return [model(inputs()) for _ in range(count)][-1]


def same(left, right):
    return left.dtype == right.dtype and left.tolist() == right.tolist()
