"""Seconds that a traced run should take on a device that is not here.

Each operator takes as long as the slower of its arithmetic and its traffic (Williams et al.,
"Roofline", CACM 2009), at the shares of the datasheet's figures that dense kernels reach in
practice. A prior: good for ranking plans, not for promises.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lowtide.memory.profiles import DeviceProfile, Precision
from lowtide.memory.scratch import operand_bytes
from lowtide.memory.trace import Op, TensorFacts, Trace

_OF_FLOPS, _OF_BANDWIDTH = 0.5, 0.7
_LAUNCH_SECONDS = 5e-6
_NAMES: dict[torch.dtype, Precision] = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


def roofline_seconds(trace: Trace, profile: DeviceProfile) -> float:
    """Seconds of a trace made with ``keep_calls`` on ``profile``'s device."""
    return sum(_seconds(op, profile) for op in trace.ops if op.call is not None)


def _seconds(op: Op, profile: DeviceProfile) -> float:
    assert op.call is not None
    traffic = operand_bytes(op.call) + max(0, op.after - op.before)
    moving = traffic / (profile.bandwidth_bytes_per_s * _OF_BANDWIDTH)
    work = flops(op.call)
    if not work:
        return _LAUNCH_SECONDS + moving
    precision = _NAMES.get(_first(op.call).dtype, "fp32")
    rate = profile.flops.get(precision) or profile.flops["fp32"]
    return _LAUNCH_SECONDS + max(moving, work / (rate * _OF_FLOPS))


def flops(call: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> int:
    """Floating-point operations of a convolution, matrix product or fused attention; else 0."""
    function, args, _ = call
    name = function.overloadpacket.__name__
    if name == "convolution":
        return _convolution(args[0], args[1], args[3:])
    if name == "convolution_backward":
        gradients = sum(bool(wanted) for wanted in args[10][:2])
        return gradients * _convolution(args[1], args[2], args[4:])
    if name in ("mm", "bmm"):
        return 2 * math.prod(args[0].shape) * args[1].shape[-1]
    if name in ("addmm", "baddbmm"):
        return 2 * math.prod(args[1].shape) * args[2].shape[-1]
    if name.startswith("_scaled_dot_product"):
        backward = name.endswith("backward") or "backward_" in name
        query, key = (args[1], args[2]) if backward else (args[0], args[1])
        return (10 if backward else 4) * math.prod(query.shape) * key.shape[-2]
    return 0


def _convolution(image: TensorFacts, kernel: TensorFacts, settings: tuple[Any, ...]) -> int:
    stride, padding, dilation, transposed = settings[:4]
    places = image.shape[2:]
    if not transposed:
        steps = zip(places, kernel.shape[2:], stride, padding, dilation, strict=True)
        places = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in steps)
    return 2 * image.shape[0] * math.prod(kernel.shape) * math.prod(places)


def _first(call: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> TensorFacts:
    return next(arg for arg in call[1] if isinstance(arg, TensorFacts))
