"""What operators need while they run beyond their results: measured once each, then remembered."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lowtide.core.heap import trim_heap
from lowtide.memory.measuring.live import live_peak_bytes
from lowtide.memory.processes import RESIDENT_PEAK, available_host_bytes, status_bytes
from lowtide.memory.store import OperatorStore
from lowtide.memory.tracing.strides import dense_strides
from lowtide.memory.tracing.trace import TensorFacts, Trace

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

# An operator is measured only if so many times its operands and results could make it the peak.
_WIDEST, _WIDEST_LOW_PRECISION = 3, 6
# Larger ones are measured on some of their rows and scaled, since their scratch grows by the
# row; on fewer bytes than that, libraries choose other algorithms.
_SCALE_ABOVE, _SCALED_BYTES = 64 << 20, 12 << 20
_LEAST_ROWS = 128
_SMALL, _TOUCHES = 1 << 20, 3
_MOST = 1 << 32
_SCALABLE = frozenset({
    torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default,
})  # fmt: skip


class Peak(NamedTuple):
    """The most that a run needs at once, scratch included, and the operator that needs it."""

    total: int
    live: int
    op: int
    name: str

    @property
    def scratch(self) -> int:
        """Bytes beyond the storages that are alive before and after."""
        return self.total - self.live


@dataclass
class HostScratch:
    """Measures operators on this machine's CPU, each signature once, kept in a store.

    ``measured`` counts what was not known yet. No operator is run whose operands and results
    exceed ``limit_bytes`` (by default a part of what is free); it is then taken at its bound
    and listed in ``assumed``.
    """

    store: OperatorStore
    limit_bytes: int = field(default_factory=lambda: _limit(available_host_bytes()))
    measured: int = 0
    assumed: list[str] = field(default_factory=list)

    def inside(self, call: Call, made: int = 0) -> int:
        """Peak bytes between the start and the end of one operator, its results included.

        ``made`` are the bytes of those results, as far as they are known.
        """
        key = signature(call)
        known = self.store.get(key)
        if known is None:
            operands = operand_bytes(call)
            if operands > _SCALE_ABOVE and call[0] in _SCALABLE and _rows(call) > _LEAST_ROWS:
                known = self._scaled(call)
            elif operands + made > self.limit_bytes:
                self.assumed.append(call[0].__name__)
                return bound(call, made)
            else:
                known = _measure(call)
            self.measured += 1
            self.store.put(key, known)
        return known

    def _scaled(self, call: Call) -> int:
        share = _SCALED_BYTES / operand_bytes(call)
        few = max(_LEAST_ROWS // 4, math.ceil(_rows(call) * share))
        (low, low_bytes), (high, high_bytes) = (
            (rows, _asked(_with_rows(call, rows))) for rows in (few, 2 * few)
        )
        slope = (high_bytes - low_bytes) / (high - low)
        asked = math.ceil(high_bytes + slope * (_rows(call) - high))
        if not _is_low_precision(call):
            return asked
        # A share of one measurement: a slope would multiply its noise.
        return math.ceil(asked * _measure(_with_rows(call, 2 * few)) / high_bytes)


def _limit(free_bytes: int) -> int:
    """What a measured operator may take: with scratch it is several times as much."""
    return min(_MOST, free_bytes // _WIDEST_LOW_PRECISION)


def peak_with_scratch(trace: Trace, inside: Callable[[Call, int], int]) -> Peak:
    """The peak of a trace with every operator's scratch, asking ``inside`` for as few as possible.

    Operators are taken in the order of what they could reach at most, so that those which
    cannot exceed the peak found so far are never measured.
    """
    best = Peak(trace.peak_bytes, trace.peak_bytes, -1, "storages")
    candidates = sorted(
        (
            (op.before + bound(op.call, op.made), index, op)
            for index, op in enumerate(trace.ops) if op.call
        ),
        key=lambda candidate: -candidate[0],
    )  # fmt: skip
    for most, index, op in candidates:
        if most <= best.total:
            break
        assert op.call is not None
        total = op.before + inside(op.call, op.made)
        if total > best.total:
            best = Peak(total, max(op.before, op.after), index, op.name)
    return best


def bound(call: Call, made: int) -> int:
    """The most that an operator may need which makes ``made`` bytes of results."""
    return made if is_plain(call) else made + widest(call) * (operand_bytes(call) + made)


def is_plain(call: Call) -> bool:
    """Whether an operator surely needs nothing beyond its results: elementwise, of one type."""
    types = {facts.dtype for facts in _tensors(call) if facts.shape}
    return torch.Tag.pointwise in call[0].tags and len(types) <= 1


def widest(call: Call) -> int:
    """How many times its operands and results an operator may need at most (a prior)."""
    return _WIDEST_LOW_PRECISION if _is_low_precision(call) else _WIDEST


def _is_low_precision(call: Call) -> bool:
    return any(facts.dtype in (torch.bfloat16, torch.float16) for facts in _tensors(call))


def operand_bytes(call: Call) -> int:
    """Bytes of an operator's tensor arguments."""
    return sum(math.prod(facts.shape) * facts.dtype.itemsize for facts in _tensors(call))


def signature(call: Call) -> str:
    """A short name for an operator with its sizes, strides, types and settings."""
    function, args, keywords = call
    words = f"{function}|{args}|{sorted(keywords.items(), key=lambda item: item[0])}"
    return hashlib.sha256(words.encode()).hexdigest()[:24]


def _tensors(call: Call) -> list[TensorFacts]:
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


def _measure(call: Call) -> int:
    asked = _asked(call)
    if asked < _SMALL or not _is_low_precision(call):
        return asked
    # In low precision oneDNN asks for room that it may not use; pages count when touched.
    with torch.inference_mode():
        return min(asked, _touched_bytes(_ready(call)) or asked)


def _asked(call: Call) -> int:
    with torch.inference_mode():
        return live_peak_bytes(_ready(call))


def _ready(call: Call) -> Callable[[], Any]:
    """The operator with real arguments of the described kinds."""
    function, args, keywords = call
    given = [_make(arg) for arg in args]
    named = {name: _make(value) for name, value in keywords.items()}
    return lambda: function(*given, **named)


def _touched_bytes(run: Callable[[], Any]) -> int | None:
    """Pages that ``run`` touches, results included; None where the system keeps no mark.

    What the process lets go of meanwhile makes the figure too low, so the highest of a few counts.
    """
    run()  # what is compiled and kept once is no scratch
    reading, most = RESIDENT_PEAK.reading(), 0
    for _ in range(_TOUCHES):
        trim_heap()  # so that what the heap reuses is touched anew
        before = status_bytes("VmRSS")
        if not reading.restart() or not before:
            return None
        run()
        most = max(most, reading.peaks()[0] - before)
    return most


def _make(value: Any) -> Any:
    """Arguments of the described kind; zeros are valid as values and as indices."""
    if isinstance(value, TensorFacts):
        span = sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True)) + 1
        storage = torch.zeros(0 if 0 in value.shape else span, dtype=value.dtype)
        return storage.as_strided(value.shape, value.stride)
    if isinstance(value, tuple):
        return [_make(part) for part in value]
    return value


class _Convolution(NamedTuple):
    """Where the arguments of a convolution, forward or backward, are; rows are of dimension 2."""

    forward: bool
    image: TensorFacts
    kernel: TensorFacts
    settings: tuple[Any, ...]

    def result_rows(self, rows: int) -> int:
        """Rows of the result for so many rows of the image."""
        stride, padding, dilation, transposed, extra = (
            value if isinstance(value, bool) else value[0] for value in self.settings[:5]
        )
        span = dilation * (self.kernel.shape[2] - 1)
        if transposed:
            return (rows - 1) * stride - 2 * padding + span + extra + 1
        return (rows + 2 * padding - span - 1) // stride + 1


def _convolution(call: Call) -> _Convolution:
    function, args, _ = call
    if function is torch.ops.aten.convolution.default:
        return _Convolution(True, args[0], args[1], args[3:])
    return _Convolution(False, args[1], args[2], args[4:])


def _rows(call: Call) -> int:
    return _convolution(call).image.shape[2]


def _with_rows(call: Call, rows: int) -> Call:
    """A convolution (or its backward) on an image of so many rows, all else the same."""
    function, args, keywords = call
    convolution = _convolution(call)
    image = _cut(convolution.image, rows)
    if convolution.forward:
        return function, (image, *args[1:]), keywords
    gradient = _cut(args[0], convolution.result_rows(rows))
    return function, (gradient, image, *args[2:]), keywords


def _cut(facts: TensorFacts, rows: int) -> TensorFacts:
    """The first rows of an image, laid out as a tensor of its own in the same order."""
    shape = (*facts.shape[:2], rows, *facts.shape[3:])
    order = sorted(range(len(shape)), key=lambda dim: (facts.stride[dim], -dim))
    return TensorFacts(shape, tuple(dense_strides(shape, order)), facts.dtype)
