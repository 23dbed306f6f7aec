"""Operator calls as plain data, and what they cost: workspace, multiply-adds and time.

The time is a roofline estimate for a device that need not be present: each operator takes as long
as the slower of its arithmetic and its memory traffic (Williams et al., "Roofline", CACM 2009), at
the shares of the datasheet's figures that dense kernels reach in practice. A prior: good for
ranking plans, not for promises.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from lowtide.attention.cpu_ops import ONEDNN_LINEAR
from lowtide.memory.profiles import DeviceProfile, Precision
from lowtide.memory.tracing.fake_fixes import dense_strides
from lowtide.memory.tracing.trace import MemoryTrace, OpRecord, TensorFacts

# The operator, its arguments and its keywords, with `TensorFacts` in place of tensors.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

# The most workspace an operator needs, as a multiple of its operands and results (a prior).
_MAX_WORKSPACE_RATIO, MAX_WORKSPACE_RATIO_LOW_PRECISION = 3, 6
# Operators of other packages, such as convolutions that unfold windows of 3×3, are never measured.
_MAX_WORKSPACE_RATIO_FOREIGN = 12
_NAMESPACES = frozenset({"aten", "prims", "mkldnn"})
_IMAGE_DIMS = 2


def workspace_bound(call: Call, result_bytes: int) -> int:
    """Return an upper bound of an operator's bytes while it runs, results included.

    ``result_bytes`` are the bytes of those results.
    """
    return (
        result_bytes
        if needs_no_workspace(call)
        else result_bytes + largest_workspace_ratio(call) * (operand_bytes(call) + result_bytes)
    )


def needs_no_workspace(call: Call) -> bool:
    """Return whether an operator surely needs no workspace.

    True for elementwise operators on tensors of one type.
    """
    types = {facts.dtype for facts in operand_tensors(call) if facts.shape}
    return torch.Tag.pointwise in call[0].tags and len(types) <= 1


def largest_workspace_ratio(call: Call) -> int:
    """Return the most workspace an operator needs, as a multiple of its tensors.

    The tensors are its operands and results; the figure is a prior.
    """
    if is_foreign(call):
        return _MAX_WORKSPACE_RATIO_FOREIGN
    low = any(facts.dtype in (torch.bfloat16, torch.float16) for facts in operand_tensors(call))
    ratio = MAX_WORKSPACE_RATIO_LOW_PRECISION if low else _MAX_WORKSPACE_RATIO
    if call[0] is torch.ops.aten.convolution.default:
        sizes = call[1][1].shape[2:]
        # Small convolutions in 3D unfold their input on the CPU.
        ratio += math.prod(sizes) if len(sizes) > _IMAGE_DIMS else 0
    return ratio


def is_foreign(call: Call) -> bool:
    """Return whether an operator is not PyTorch's own."""
    return call[0].namespace not in _NAMESPACES


def operand_bytes(call: Call) -> int:
    """Return the bytes of an operator's tensor arguments."""
    return sum(math.prod(facts.shape) * facts.dtype.itemsize for facts in operand_tensors(call))


def operator_signature(call: Call) -> str:
    """Return a hash of an operator with its sizes, strides, types and settings."""
    function, args, keywords = call
    text = f"{function}|{args}|{sorted(keywords.items(), key=lambda item: item[0])}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def operand_tensors(call: Call) -> list[TensorFacts]:
    """Return the `TensorFacts` of every tensor among an operator's arguments."""
    found: list[TensorFacts] = []

    def walk(value: Any) -> None:
        if isinstance(value, TensorFacts):
            found.append(value)
        elif isinstance(value, tuple):
            for part in value:
                walk(part)

    walk(call[1])
    walk(tuple(call[2].values()))
    return found


class _Convolution(NamedTuple):
    """Arguments of a convolution, forward or backward; rows are along dim 2."""

    forward: bool
    image: TensorFacts
    kernel: TensorFacts
    settings: tuple[Any, ...]

    @property
    def receptive_rows(self) -> int:
        """Height of the receptive field of one row of the result, in image rows."""
        return self.settings[2][0] * (self.kernel.shape[2] - 1) + 1

    def result_rows(self, rows: int) -> int:
        """Return the height of the result for an image of ``rows`` rows."""
        stride, padding, _, transposed, extra = (
            value if isinstance(value, bool) else value[0] for value in self.settings[:5]
        )
        if transposed:
            return (rows - 1) * stride - 2 * padding + self.receptive_rows + extra
        return (rows + 2 * padding - self.receptive_rows) // stride + 1


def _convolution(call: Call) -> _Convolution:
    function, args, _ = call
    if function is torch.ops.aten.convolution.default:
        return _Convolution(True, args[0], args[1], args[3:])
    return _Convolution(False, args[1], args[2], args[4:])


def convolution_rows(call: Call) -> int:
    """Return the height of a convolution's image, forward or backward."""
    return _convolution(call).image.shape[2]


def receptive_rows(call: Call) -> int:
    """Return the height of a convolution's receptive field, in rows of its image."""
    return _convolution(call).receptive_rows


def convolution_with_rows(call: Call, rows: int) -> Call:
    """Return the same convolution (or its backward) on an image of ``rows`` rows."""
    function, args, keywords = call
    convolution = _convolution(call)
    image = _crop_rows(convolution.image, rows)
    if convolution.forward:
        return function, (image, *args[1:]), keywords
    gradient = _crop_rows(args[0], convolution.result_rows(rows))
    return function, (gradient, image, *args[2:]), keywords


def _crop_rows(facts: TensorFacts, rows: int) -> TensorFacts:
    """Return an image's first rows as a dense tensor with dims in the same order."""
    shape = (*facts.shape[:2], rows, *facts.shape[3:])
    order = sorted(range(len(shape)), key=lambda dim: (facts.stride[dim], -dim))
    return TensorFacts(shape, tuple(dense_strides(shape, order)), facts.dtype)


_aten = torch.ops.aten


def multiply_adds(trace: MemoryTrace, phases: Collection[str] | None = None) -> int:
    """Count the multiply-adds of the matrix products, convolutions and attention.

    With ``phases`` only operators of these marked phases count. Elementwise operators are left
    out, since their time depends on the bytes they move. The counts follow the operators'
    definitions, whatever the kernels do.
    """
    return sum(
        multiply_adds_of(op.call)
        for number, op in enumerate(trace.ops)
        if op.call is not None and (phases is None or trace.phase(number) in phases)
    )


def multiply_adds_of(call: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> int:
    """Count the multiply-adds of one operator call.

    0 for all but matrix products, convolutions and attention.
    """
    count = _MAC_COUNTERS.get(call[0])
    return 0 if count is None else count(call[1])


def _matmul(left: Any, right: Any) -> int:
    """Count multiply-adds of (..., rows, inner) times (..., inner, columns)."""
    return math.prod(left.shape) * right.shape[-1]


def _convolution_macs(args: tuple[Any, ...]) -> int:
    image, kernel, _, stride, padding, dilation, transposed = args[:7]
    if transposed:
        # A transposed convolution multiplies each pixel of its input by the whole kernel.
        return image.shape[0] * math.prod(image.shape[2:]) * math.prod(kernel.shape)
    sides = zip(
        image.shape[2:],
        kernel.shape[2:],
        _per_dim(stride, image),
        _per_dim(padding, image),
        _per_dim(dilation, image),
        strict=True,
    )
    pixels = math.prod(
        (side + 2 * pad - gap * (width - 1) - 1) // step + 1
        for side, width, step, pad, gap in sides
    )
    return image.shape[0] * pixels * math.prod(kernel.shape)


def _per_dim(setting: Any, image: Any) -> tuple[int, ...]:
    """Expand a setting to one value per spatial dim."""
    return setting if len(setting) > 1 else setting * (len(image.shape) - 2)


def _convolution_backward_macs(args: tuple[Any, ...]) -> int:
    gradient, image, kernel = args[:3]
    transposed, output_mask = args[7], args[10]
    pixels = math.prod((image if transposed else gradient).shape[2:])
    return (output_mask[0] + output_mask[1]) * image.shape[0] * pixels * math.prod(kernel.shape)


def _attention(query: Any, key: Any, value: Any) -> int:
    """Count multiply-adds of the scores and of their product with the values."""
    rows = math.prod(query.shape[:-1])
    return rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(query: Any, key: Any, value: Any) -> int:
    """Count multiply-adds of the recomputed scores and the gradients' four products."""
    rows = math.prod(query.shape[:-1])
    return rows * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_ATTENTION = "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
_MAC_COUNTERS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    _aten.mm.default: lambda args: _matmul(args[0], args[1]),
    _aten.bmm.default: lambda args: _matmul(args[0], args[1]),
    _aten.addmm.default: lambda args: _matmul(args[1], args[2]),
    _aten.baddbmm.default: lambda args: _matmul(args[1], args[2]),
    _aten.convolution.default: _convolution_macs,
    _aten.convolution_backward.default: _convolution_backward_macs,
}
if ONEDNN_LINEAR is not None:
    _MAC_COUNTERS[ONEDNN_LINEAR] = lambda args: math.prod(args[0].shape) * args[1].shape[0]
# Not every release has all of these operators.
for _name in _ATTENTION:
    if hasattr(_aten, f"_scaled_dot_product_{_name}"):
        _forward = getattr(_aten, f"_scaled_dot_product_{_name}").default
        _backward = getattr(_aten, f"_scaled_dot_product_{_name}_backward").default
        _MAC_COUNTERS[_forward] = lambda args: _attention(*args[:3])
        _MAC_COUNTERS[_backward] = lambda args: _attention_backward(*args[1:4])


_FLOPS_EFFICIENCY, _BANDWIDTH_EFFICIENCY = 0.5, 0.7
_LAUNCH_SECONDS = 5e-6
_NAMES: dict[torch.dtype, Precision] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def roofline_seconds(trace: MemoryTrace, profile: DeviceProfile) -> float:
    """Estimate the seconds of ``trace`` on ``profile``'s device.

    Only operators with a recorded call count, so ``trace`` must be made with ``keep_calls``.
    """
    return sum(_seconds(op, profile) for op in trace.ops if op.call is not None)


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
