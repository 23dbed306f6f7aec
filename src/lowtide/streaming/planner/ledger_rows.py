"""Ledger rows of a candidate plan, and their bounds calibrated by past runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lowtide.core.heap import heap_mode
from lowtide.core.units import MIB
from lowtide.memory.costs import ModelCosts
from lowtide.memory.plan import LedgerRow, Origin, Place, Plan, TiledStrategy
from lowtide.memory.prediction.calibration import BoundCalibration, RunBounds
from lowtide.streaming.planner.model_facts import ImageTask

ROW_BUFFERS = "input rows", "output rows"
# What decoders and encoders hold while the network runs; and what encoding the whole image at the
# end takes beyond all that is free by then. Their bounds are fitted to the formats.
FORMATS_ROW, ENCODING_ROW = "file formats", "encoding at the end"
_FORMAT_ROWS = FORMATS_ROW, ENCODING_ROW
LIVE_ROW = "live activations and workspace"
# Rows of the ledger that do not depend on the network's input.
_FIXED_ROWS = {"weights", "runtime", "context", *_FORMAT_ROWS, *ROW_BUFFERS}
# Most and fewest network pixels of a comparison: more show no more, fewer prove nothing.
_COMPARED_PIXELS, _FEWEST_PIXELS = 512 * 512, 64 * 64
# Least margin of a tiled plan, whatever past runs say.
LEAST_MARGIN = 16 * MIB
# The same when the network no longer runs: kernels and small blocks that it leaves, 6 MiB at most.
_LEFT_BY_RUN = 8 * MIB
# Thread stacks and what libraries set up at first use: not visible in a large run, and up to this
# many bytes in a small one.
_RUNTIME_UPPER = 40 * MIB
_LIVE_UPPER = 1.05
# Bound of heap overhead in a long run, beyond that of a probe.
_SLACK_UPPER, _SLACK_SHARE = 1.3, 0.3
# Memory returned to the system is faulted in again page by page: eight models took 1.3 to 1.7 times
# as long.
_TRIM_SLOWDOWN = 1.5
# Ratio of seconds up to which two plans count as equally fast.
EQUALLY_FAST = 1.03


def calibrate_margin(
    rows: tuple[LedgerRow, ...], calibration: BoundCalibration | None, device: str
) -> tuple[LedgerRow, ...]:
    """Return ``rows`` with the upper bound that past runs on ``device`` call for.

    It replaces the general bounds of all but file formats, whose files those runs do not cover.
    Where past runs cover many model families, their bound holds, with the least margin, since small
    runs vary more. Otherwise at least half of the general margin stays, since another model may
    exceed it. Encoding at the end has less margin, since the network does not run then.
    """
    if calibration is None:
        return rows
    memory = [row for row in rows if row.place != "disk"]
    network = [row for row in memory if row.name not in _FORMAT_ROWS]
    expected, general = sum(row.value for row in network), sum(row.upper for row in network)
    kept = sum(row.value for row in network if row.name == "allocator")
    margin, allowed = calibration.upper(expected, kept) - expected, general - expected
    margin = max(margin, LEAST_MARGIN if calibration.families else allowed // 2)
    if device == "cpu":
        margin = _beside_formats(margin, memory)
    return (
        *(row if row.name in _FORMAT_ROWS else replace(row, upper=row.value) for row in memory),
        LedgerRow(name="margin", place="device", value=0, upper=margin, origin="calibrated"),
        *(row for row in rows if row.place == "disk"),
    )


def _beside_formats(margin: int, rows: list[LedgerRow]) -> int:
    """Return what is left of a ``margin`` beside the bounds of file formats among ``rows``."""
    formats = [row for row in rows if row.name == FORMATS_ROW]
    counted = sum(row.upper - beyond_least_margin(row.value, row.upper) for row in formats)
    at_the_end = sum(row.upper for row in rows if row.name == ENCODING_ROW)
    return max(_LEFT_BY_RUN if at_the_end else 0, margin - counted - at_the_end)


def beyond_least_margin(usual: int, most: int) -> int:
    """Return the bound of a file format's bytes beside the least margin of a plan.

    That margin holds windows of a few rows, which every run has.
    """
    return usual + max(0, most - usual - LEAST_MARGIN)


def with_heap_modes(plans: list[Plan], bounds: RunBounds) -> list[Plan]:
    """Return ``plans``, each also in the heap mode that gives freed blocks back.

    Only where this process can run in that mode.
    """
    if not bounds.can_trim:
        return plans
    thrifty = [_with_trimmed_heap(plan, bounds) for plan in plans]
    return [plan.model_copy(update={"heap": "cache"}) for plan in plans] + thrifty


def _with_trimmed_heap(plan: Plan, bounds: RunBounds) -> Plan:
    """Return ``plan`` in a heap that holds live blocks only, which takes longer."""
    rows = [
        replace(row, value=0, upper=0) if row.name == "allocator" else row
        for row in plan.ledger
        if bounds.current_heap is None or row.name != "margin"
    ]
    return plan.model_copy(
        update={
            "heap": "trim",
            "seconds": plan.seconds * _TRIM_SLOWDOWN,
            "ledger": calibrate_margin(tuple(rows), bounds.trimming_heap, plan.device),
        }
    )


def _run_bytes(costs: ModelCosts, pixels: int) -> float:
    """Return an upper bound of a run's bytes: live ones and allocator overhead."""
    live = costs.activation_bytes(pixels)
    return live * (_LIVE_UPPER + _SLACK_SHARE) + _SLACK_UPPER * costs.slack_bytes(pixels)


def affordable_pixels(
    costs: ModelCosts, plan: Plan, tiles: TiledStrategy, budget_bytes: int
) -> int:
    """Return the image pixels that fit at once while the plan's rows stay.

    For measuring errors.
    """
    spare = budget_bytes - plan.upper_bytes
    pixels = tiles.run_pixels
    used = _run_bytes(costs, pixels)
    while pixels < 1 << 34:
        more = pixels * 9 // 8
        if _run_bytes(costs, more) - used > spare:
            break
        pixels = more
    return pixels // plan.image.network_inputs


def comparable_pixels(costs: ModelCosts, plan: Plan, budget_bytes: int) -> int:
    """Return the image pixels that fit at once in fp32, after the plan has run.

    fp32 takes twice the memory of the plan's half precision.
    """
    places = {"device", "host"} if costs.device == "cpu" else {"device"}
    kept = sum(row.upper for row in plan.ledger if row.place in places and row.name in _FIXED_ROWS)
    pixels = _COMPARED_PIXELS
    while pixels > _FEWEST_PIXELS and 2 * _run_bytes(costs, pixels) > budget_bytes - kept:
        pixels = pixels * 7 // 8
    return pixels // plan.image.network_inputs


def ledger_row(name: str, place: Place, value: float, upper: float, origin: Origin) -> LedgerRow:
    """Return a ledger row in whole bytes."""
    return LedgerRow(name=name, place=place, value=int(value), upper=int(upper), origin=origin)


def activation_row(costs: ModelCosts, pixels: int) -> Iterator[LedgerRow]:
    """Yield the rows of live activations and allocator for ``pixels`` network pixels."""
    live = costs.activation_bytes(pixels)
    origin = "traced" if costs.traced_points else "probed"
    yield ledger_row(LIVE_ROW, "device", live, live * _LIVE_UPPER, origin)
    mode = heap_mode()
    known = costs.reused_blocks(pixels) if mode == "cache" or not costs.points else None
    if known is None:
        slack = costs.slack_bytes(pixels)
    else:
        slack = 0 if mode == "trim" else known.retained_bytes
    most = _SLACK_UPPER * slack + _SLACK_SHARE * live
    yield ledger_row("allocator", "device", slack, most, "probed" if known is None else origin)


def run_ledger(
    costs: ModelCosts,
    image_task: ImageTask,
    network_rows: Iterable[LedgerRow],
    *,
    staged_bytes: int,
    row_bytes: tuple[int, int],
    scratch_bytes: int = 0,
) -> Iterator[LedgerRow]:
    """Yield all ledger rows of a run.

    Args:
        costs: Measured costs of the model.
        image_task: The image and its files.
        network_rows: Rows of the network's part.
        staged_bytes: Bytes in flight to another device and back at once.
        row_bytes: Bytes of the file rows held: (read, written).
        scratch_bytes: Disk bytes in addition to those of the file formats.
    """
    yield ledger_row("weights", "device", costs.weight_bytes, costs.weight_bytes, "known")
    runtime = free_at_end = 0
    for one in network_rows:
        if one.name == "runtime":
            runtime = one.value
            continue
        yield one
        # What the heap keeps is free too, but not for blocks of other sizes.
        if costs.device == "cpu" and one.place == "device" and one.name != "allocator":
            free_at_end += one.value
    if costs.device == "cpu":
        runtime += image_task.extra_resident_bytes
        yield ledger_row("runtime", "host", runtime, runtime + _RUNTIME_UPPER, "prior")
    else:
        yield ledger_row(
            "context", "device", costs.context_bytes, costs.context_bytes * 1.1, "probed"
        )
        yield ledger_row("copy buffers", "host", staged_bytes, 2 * staged_bytes, "known")
    for name, count in zip(ROW_BUFFERS, row_bytes, strict=True):
        yield ledger_row(name, "host", count, count, "known")
    usual, most = (sum(each) for each in zip((0, 0), *image_task.codec_bytes, strict=True))
    yield ledger_row(FORMATS_ROW, "host", usual, most, "prior")
    at_end = [taken - free_at_end for taken in image_task.finishing_bytes]
    if at_end[1] > most:
        value = min(max(0, at_end[0] - usual), at_end[1] - most)
        yield ledger_row(ENCODING_ROW, "host", value, at_end[1] - most, "prior")
    if scratch := image_task.scratch_bytes + scratch_bytes:
        yield ledger_row("scratch file", "disk", scratch, scratch, "known")
