"""Roofline time estimate of a traced run on a device that need not be present.

Each operator takes as long as the slower of its arithmetic and its memory traffic (Williams et
al., "Roofline", CACM 2009), at the shares of the datasheet's figures that dense kernels reach in
practice. A prior: good for ranking plans, not for promises.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.memory.prediction.op_signature import operand_bytes
from lowtide.memory.profiles import DeviceProfile, Precision
from lowtide.memory.tracing.macs_count import multiply_adds_of
from lowtide.memory.tracing.trace import OpRecord, TensorFacts, Trace

_FLOPS_EFFICIENCY, _BANDWIDTH_EFFICIENCY = 0.5, 0.7
_LAUNCH_SECONDS = 5e-6
_NAMES: dict[torch.dtype, Precision] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def roofline_seconds(trace: Trace, profile: DeviceProfile) -> float:
    """Estimate the seconds of ``trace`` on ``profile``'s device.

    Only operators with a recorded call count, so ``trace`` must be made with ``keep_calls``.
    """
    return sum(op.repeats * _seconds(op, profile) for op in trace.ops if op.call is not None)


def _seconds(op: OpRecord, profile: DeviceProfile) -> float:
    assert op.call is not None
    traffic = operand_bytes(op.call) + max(0, op.bytes_after - op.bytes_before)
    moving = traffic / (profile.bandwidth_bytes_per_s * _BANDWIDTH_EFFICIENCY)
    work = 2 * multiply_adds_of(op.call)
    if not work:
        return _LAUNCH_SECONDS + moving
    precision = _NAMES.get(_first(op.call).dtype, "fp32")
    rate = profile.flops.get(precision) or profile.flops["fp32"]
    return _LAUNCH_SECONDS + max(moving, work / (rate * _FLOPS_EFFICIENCY))


def _first(call: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> TensorFacts:
    return next(arg for arg in call[1] if isinstance(arg, TensorFacts))
