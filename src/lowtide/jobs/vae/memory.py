"""Memory that a video and its latents take while a part of an autoencoder runs."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.core.units import MIB
from lowtide.integrations.clip_autoencoder import PlannedPart
from lowtide.jobs.clips.memory import reading_bytes
from lowtide.jobs.clips.rows import BAND_ROWS
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.engine.report import MemoryReport
from lowtide.memory.ledger import LedgerRow, Place
from lowtide.memory.meter import Usage

# Bytes of a color pixel in float32, and the arrays in float64 that comparing a band takes.
_PIXEL, _COMPARING = 12, 12 * 2
# Of libraries that read and write files, whatever is in them.
_FILES = 2 * MIB


def latents_row(shape: Sequence[int], place: Place) -> LedgerRow:
    """Return the row of latents (C, n, h, w) in float32, kept as mean and log variance."""
    channels, number, height, width = shape
    count = 2 * 4 * channels * number * height * width
    return LedgerRow(name="latents", place=place, value=count, upper=count, origin="known")


def reading_row(task: VideoTask, frames: int, place: Place) -> LedgerRow:
    """Return the row of reading a video, ``frames`` at a time as float32."""
    upper, usual = reading_bytes(task.facts.format)
    held = _FILES + frames * _pixels(task) * _PIXEL
    taken = task.facts.format
    if (taken.height, taken.width) != (task.stored.height, task.stored.width):
        held += (taken.height * taken.width + _pixels(task)) * _PIXEL
    return _row("reading", place, usual + held, upper + held)


def writing_row(task: VideoTask, frames: int, place: Place) -> LedgerRow:
    """Return the row of writing a video, ``frames`` at a time as float32, and one as an image."""
    upper, usual = task.writing_bytes
    held = _FILES + (frames + 1) * _pixels(task) * _PIXEL
    return _row("writing", place, usual + held, upper + held)


def comparing_row(task: VideoTask, frames: int, place: Place) -> LedgerRow:
    """Return the row of comparing frames, ``frames`` at a time, with those that are read again."""
    upper, usual = reading_bytes(task.facts.format)
    held = (frames + 2) * _pixels(task) * _PIXEL
    held += _COMPARING * _PIXEL * BAND_ROWS * task.stored.width
    return _row("comparing", place, usual + held, upper + held)


def memory_report(
    budget_bytes: int,
    parts: Sequence[PlannedPart],
    rows: Sequence[Sequence[LedgerRow]],
    usage: Usage,
) -> MemoryReport:
    """Return the memory of parts that ran one after another, each with these rows."""
    ledgers = [
        (
            _row("chunks, bands and state", "device", part.plan.peak_bytes, part.plan.upper_bytes),
            *more,
        )
        for part, more in zip(parts, rows, strict=True)
    ]
    most = max(ledgers, key=lambda ledger: device_bytes(ledger, upper=True))
    return MemoryReport(
        budget_bytes=budget_bytes,
        predicted_bytes=max(device_bytes(one, upper=False) for one in ledgers),
        upper_bytes=device_bytes(most, upper=True),
        peak_bytes=usage.peak_bytes,
        high_water_bytes=usage.high_water_bytes,
        within_budget=usage.peak_bytes <= budget_bytes,
        source=usage.source,
        ledger=most,
    )


def device_bytes(rows: Sequence[LedgerRow], *, upper: bool) -> int:
    """Return the bytes on the device that rows expect, or their upper bound."""
    return sum(row.upper if upper else row.value for row in rows if row.place == "device")


def _pixels(task: VideoTask) -> int:
    return task.stored.height * task.stored.width


def _row(name: str, place: Place, value: int, upper: int) -> LedgerRow:
    return LedgerRow(name=name, place=place, value=value, upper=upper, origin="prior")
