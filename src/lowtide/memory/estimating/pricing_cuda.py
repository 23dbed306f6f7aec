"""The ledger of a traced run on a CUDA device: storages replayed through the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.attention.products import ONEDNN_LINEAR
from lowtide.memory.estimating.calibration import Calibration
from lowtide.memory.estimating.calls import Call
from lowtide.memory.estimating.priced import Priced, margin_row, traced_rows
from lowtide.memory.ledger import LedgerRow, Origin
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.simulation.piece import Event, best_piece, replayed
from lowtide.memory.tracing.trace import Trace

_PRODUCTS = frozenset({
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default, ONEDNN_LINEAR,
}) - {None}  # fmt: skip
_CONVOLUTIONS = frozenset({
    torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default,
})  # fmt: skip
# Workspaces that stay with a thread once it has multiplied matrices: the step's own, and that of
# autograd, which runs backward passes on CUDA in a thread of its own. (A convolution's has -2.)
_BLAS = {False: -1, True: -3}
# What a convolution takes beside its result of so many bytes.
Scratch = Callable[[Call, int], int]


def price_on_cuda(
    trace: Trace, profile: DeviceProfile, calibration: Calibration,
    scratch: Scratch | None = None, *, in_one: bool = False,
) -> Priced:  # fmt: skip
    """What the process would hold on ``profile``'s device: reserved bytes and the context.

    Convolutions take what ``scratch`` says, or what the profile supposes. If ``in_one``, a piece
    of memory is taken and given back before the run, of a size that `Priced.piece` tells.
    """
    held = [(storage, size) for storage, size in trace.held.items() if size]
    runs = [
        list(_events(trace, blas, scratch or _supposed(profile, upper)))
        for upper, blas in enumerate(profile.workspaces.blas_bytes)
    ]
    piece = best_piece(held, runs[0]) if in_one else 0
    expected, upper = (replayed(held, events, piece) for events in runs)
    where = trace.peak_op()
    rows = traced_rows(trace, None)
    live = sum(row.value for row in rows)
    threads = len(_multiplying(trace))
    blas = [threads * size for size in profile.workspaces.blas_bytes]
    beside, most = (max(run.peak_allocated - live, 0) for run in (expected, upper))
    origin: Origin = "prior" if scratch is None else "probed"
    rows.append(_row("scratch", max(beside, blas[0]), max(most, blas[1]), origin))
    known = sum(row.value for row in rows), sum(row.upper for row in rows)
    rows.append(_row(
        "allocator", max(0, expected.peak_reserved - known[0]),
        max(0, upper.peak_reserved - known[1]), "simulated",
    ))  # fmt: skip
    rows.append(_row("context", profile.context_bytes, profile.context_upper_bytes, "prior"))
    predicted = sum(row.value for row in rows)
    rows.append(margin_row(rows, max(calibration.upper(predicted), sum(r.upper for r in rows))))
    name = trace.ops[where].name if where < len(trace.ops) else ""
    return Priced(tuple(rows), trace.phase(where), name, trace.peak_bytes, piece=piece)


def _row(name: str, value: int, upper: int, origin: Origin) -> LedgerRow:
    return LedgerRow(
        name=name, place="device", value=value, upper=max(value, upper), origin=origin
    )


def _supposed(profile: DeviceProfile, upper: int) -> Scratch:
    def scratch(call: Call, made: int) -> int:
        channels_last = _is_channels_last(call[1][0])
        return profile.workspaces.conv_bytes(made, channels_last=channels_last)[upper]

    return scratch


def _events(trace: Trace, blas_bytes: int, scratch: Scratch) -> Iterator[Event]:
    """Storages as they come and go, with the workspaces of the operators between them."""
    done, first = 0, _multiplying(trace)
    for event in (*trace.events, None):
        until = len(trace.ops) if event is None else event.op
        for index, op in enumerate(trace.ops[done:until], done):
            if (backward := first.get(index)) is not None:
                yield _BLAS[backward], blas_bytes
            if op.call and op.call[0] in _CONVOLUTIONS and (size := scratch(op.call, op.made)):
                yield -2, size
                yield -2, -size
        done = max(done, until)
        if event is not None and event.size:
            yield event.storage, event.size


def _is_channels_last(facts: Any) -> bool:
    return len(facts.stride) == 4 and facts.stride[1] == 1 and facts.shape[1] > 1


def _multiplying(trace: Trace) -> dict[int, bool]:
    """The first product of each thread that makes any, and whether that thread is autograd's."""
    first: dict[bool, int] = {}
    for index, op in enumerate(trace.ops):
        if op.call is not None and op.call[0] in _PRODUCTS:
            first.setdefault(trace.phase(index) == "backward", index)
    return {index: backward for backward, index in first.items()}
