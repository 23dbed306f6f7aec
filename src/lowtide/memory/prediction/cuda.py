"""The ledger of a traced run on a CUDA device: storages replayed through the allocator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.attention.linear_ops import ONEDNN_LINEAR
from lowtide.memory.ledger import LedgerRow, Origin
from lowtide.memory.prediction.calibration import Calibration
from lowtide.memory.prediction.op_signature import Call
from lowtide.memory.prediction.result import PredictedMemory, live_tensor_rows, margin_row
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.simulation.arena_search import Event, best_arena_bytes, replay_with_arena
from lowtide.memory.tracing.fake_strides import dense_strides
from lowtide.memory.tracing.trace import OpRecord, Trace

_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        ONEDNN_LINEAR,
    }
) - {None}
_CONVOLUTIONS = frozenset(
    {
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
    }
)
# Workspaces that stay with a thread once it has multiplied matrices: the step's own, and that of
# autograd, which runs backward passes on CUDA in a thread of its own; and what a convolution takes.
_BLAS = {False: -1, True: -3}
_SCRATCH, _COPY = -2, -4
# What a convolution takes beside its result of so many bytes.
Scratch = Callable[[Call, int], int]


def predict_cuda(
    trace: Trace,
    profile: DeviceProfile,
    calibration: Calibration,
    scratch: Scratch | None = None,
    *,
    in_one: str | None = None,
) -> PredictedMemory:
    """What the process would hold on ``profile``'s device: reserved bytes and the context.

    Convolutions take what ``scratch`` says, or what the profile supposes. Before the phase
    ``in_one`` a piece of memory is taken and given back, of a size that `PredictedMemory.piece`
    tells, and before it what products of matrices have for good.
    """
    held = [(storage, size) for storage, size in trace.held.items() if size]
    first = next((start for start, name in trace.marks if name == in_one), 0)
    early = (event for event in trace.events if event.op < first and event.size)
    held += [(event.storage, event.size) for event in early]
    runs = [
        (held, list(_events(trace, blas, scratch or _supposed(profile, upper), first)))
        for upper, blas in enumerate(profile.workspaces.blas_bytes)
    ]
    piece = 0
    if in_one is not None:
        prepared = [_products_first(*run) for run in runs]
        piece = best_arena_bytes(*prepared[0])
        runs = prepared if piece else runs
    expected, upper = (replay_with_arena(*run, piece) for run in runs)
    where = trace.peak_op()
    rows = live_tensor_rows(trace, None)
    live = sum(row.value for row in rows)
    threads = len(_multiplying(trace))
    blas = [threads * size for size in profile.workspaces.blas_bytes]
    beside, most = (max(run.peak_allocated - live, 0) for run in (expected, upper))
    origin: Origin = "prior" if scratch is None else "probed"
    rows.append(_row("scratch", max(beside, blas[0]), max(most, blas[1]), origin))
    known = sum(row.value for row in rows), sum(row.upper for row in rows)
    rows.append(
        _row(
            "allocator",
            max(0, expected.peak_reserved - known[0]),
            max(0, upper.peak_reserved - known[1]),
            "simulated",
        )
    )
    rows.append(_row("context", profile.context_bytes, profile.context_upper_bytes, "prior"))
    predicted = sum(row.value for row in rows)
    rows.append(margin_row(rows, max(calibration.upper(predicted), sum(r.upper for r in rows))))
    name = trace.ops[where].name if where < len(trace.ops) else ""
    return PredictedMemory(tuple(rows), trace.phase(where), name, trace.peak_bytes, piece=piece)


def _row(name: str, value: int, upper: int, origin: Origin) -> LedgerRow:
    return LedgerRow(name=name, place="device", value=value, upper=max(value, upper), origin=origin)


def _supposed(profile: DeviceProfile, upper: int) -> Scratch:
    def scratch(call: Call, made: int) -> int:
        channels_last = _is_channels_last(call[1][0])
        known = profile.workspaces.conv_bytes(made, channels_last=channels_last)[upper]
        return known + _copy_of_image(call)

    return scratch


def _events(trace: Trace, blas_bytes: int, scratch: Scratch, start: int) -> Iterator[Event]:
    """Storages as they come and go from operator ``start`` on, with what the operators take for
    themselves: workspaces of products stay, convolutions take theirs once their result is there,
    but for copies of images that lie in no order of theirs, which are made before it."""
    done, copies, first = start, dict[int, int](), _multiplying(trace)
    for event in (*(event for event in trace.events if event.op >= start), None):
        until = len(trace.ops) if event is None else event.op
        for index, op in enumerate(trace.ops[done:until], done):
            if (backward := first.get(index)) is not None:
                yield _BLAS[backward], blas_bytes
            copied = copies.pop(index, 0)
            if op.call and op.call[0] in _CONVOLUTIONS:
                rest = scratch(op.call, op.made) - copied
                yield from ((_SCRATCH, rest), (_SCRATCH, -rest)) if rest else ()
            if copied:
                yield _COPY, -copied
        done = max(done, until)
        if event is None or not event.size:
            continue
        if event.size > 0 and until not in copies and until < len(trace.ops):
            copies[until] = _copied(trace.ops[until], scratch)
            if copies[until]:
                yield _COPY, copies[until]
        yield event.storage, event.size


def _products_first(held: list[Event], events: list[Event]) -> tuple[list[Event], list[Event]]:
    """What is held, with the workspaces that stay, and the rest of a run."""
    staying = set(_BLAS.values())
    first = [event for event in events if event[0] in staying]
    return [*held, *first], [event for event in events if event[0] not in staying]


def _copied(op: OpRecord, scratch: Scratch) -> int:
    """Of what a convolution takes for itself the bytes of its image, if that is copied first."""
    if op.call is None or op.call[0] is not torch.ops.aten.convolution.default:
        return 0
    size = _copy_of_image(op.call)
    return min(size, scratch(op.call, op.made)) if size else 0


def _copy_of_image(call: Call) -> int:
    """The bytes of a convolution's image if it has gaps, or lies in no order that PyTorch knows by
    its strides: those of its batch, of one image too, are to be larger than all others."""
    image, weight = call[1][:2]
    channels_last = _suggests_channels_last(image) or _suggests_channels_last(weight)
    order = (1, 3, 2, 0) if channels_last else range(len(image.shape))[::-1]
    dense = dense_strides(image.shape, order)
    lies = zip(image.shape, image.stride, dense, strict=True)
    fits = all(side == 1 or stride == wanted for side, stride, wanted in lies)
    return 0 if fits else math.prod(image.shape) * image.dtype.itemsize


def _suggests_channels_last(facts: Any) -> bool:
    """``c10::is_channels_last_strides_2d`` of pytorch/pytorch."""
    if len(facts.shape) != 4:
        return False
    least = 0
    for place in (1, 3, 2, 0):
        stride = facts.stride[place]
        if not facts.shape[place] or stride < least or (place == 0 and least == facts.stride[1]):
            return False
        least = stride * facts.shape[place]
    return True


def _is_channels_last(facts: Any) -> bool:
    return len(facts.stride) == 4 and facts.stride[1] == 1 and facts.shape[1] > 1


def _multiplying(trace: Trace) -> dict[int, bool]:
    """The first product of each thread that makes any, and whether that thread is autograd's."""
    first: dict[bool, int] = {}
    for index, op in enumerate(trace.ops):
        if op.call is not None and op.call[0] in _PRODUCTS:
            first.setdefault(trace.phase(index) == "backward", index)
    return {index: backward for backward, index in first.items()}
