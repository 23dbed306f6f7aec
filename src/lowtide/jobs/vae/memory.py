"""Memory that a video and its latents take while a part of an autoencoder runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.core.option import Precision
from lowtide.core.units import MIB
from lowtide.integrations.clip_autoencoder import ClipAutoencoder, PartName, PlannedClipPart
from lowtide.jobs.clips.memory import reading_bytes
from lowtide.jobs.clips.rows import BAND_ROWS
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.vae.inputs import ClipShapes, VaeClip
from lowtide.memory.budget import Budget
from lowtide.memory.plan import ImageGeometry, LedgerRow, Place, Plan, StreamedStrategy

# Bytes of a color pixel in float32, and the arrays in float64 that comparing a band takes.
_PIXEL, _COMPARING = 12, 12 * 2
# Of libraries that read and write files, whatever is in them.
_FILES = 2 * MIB


def part_rows(name: PartName, model: ClipAutoencoder, clip: VaeClip) -> list[LedgerRow]:
    """Return what takes memory while a part runs, beside the part."""
    place: Place = "device" if model.budget.device == "cpu" else "host"
    frames, task = model.chunk_frames(name), clip.task
    rows = [latents_row(clip.shapes.latents, place)]
    if name == "encoder":
        return [*rows, reading_row(task, frames, place)]
    if clip.found.target is not None:
        rows.append(writing_row(task, frames, place))
    if clip.found.operation == "roundtrip":
        rows.append(comparing_row(task, frames, place))
    return rows


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


def clip_plan(
    shapes: ClipShapes,
    parts: Mapping[PartName, PlannedClipPart],
    rows: Mapping[PartName, Sequence[LedgerRow]],
    budget: Budget,
    precision: Precision,
) -> Plan:
    """Return the plan of parts that run one after another, each with these rows.

    Its ledger is that of the part that takes most.
    """
    ledgers = [(part, (_part_row(part), *rows[name])) for name, part in parts.items()]
    most, ledger = max(ledgers, key=lambda one: device_bytes(one[1], upper=True))
    prepared = most.plan.runs[-1].prepared
    frames, height, width = shapes.frames
    _, padded_height, padded_width = shapes.padded
    return Plan(
        strategy=StreamedStrategy(
            cuts=prepared.layout.cuts,
            bands=prepared.layout.bands,
            pages=prepared.layout.placement,
            resident=tuple(sorted(prepared.layout.resident)),
            intermediate_peak_bytes=prepared.layout.pages_bytes,
            spilled_peak_bytes=prepared.layout.spilled_peak_bytes,
            graph_digest=prepared.program.operators_digest,
            panel_width=padded_width,
        ),
        accuracy="exact",
        device=budget.device,
        precision=precision,
        channels_last=False,
        heap="trim",
        image=ImageGeometry(
            width=width,
            height=height,
            padded_width=padded_width,
            padded_height=padded_height,
            scale=1,
            align=1,
            network_inputs=frames,
        ),
        seconds=sum(part.plan.overhead_seconds for part in parts.values()),
        budget_bytes=budget.device_bytes,
        host_budget_bytes=budget.host_bytes,
        choice="; ".join(f"{name}: {part.plan.title}" for name, part in parts.items()),
        ledger=ledger,
    )


def device_bytes(rows: Sequence[LedgerRow], *, upper: bool) -> int:
    """Return the bytes on the device that rows expect, or their upper bound."""
    return sum(row.upper if upper else row.value for row in rows if row.place == "device")


def _pixels(task: VideoTask) -> int:
    return task.stored.height * task.stored.width


def _part_row(part: PlannedClipPart) -> LedgerRow:
    return _row("chunks, bands and state", "device", part.plan.peak_bytes, part.plan.upper_bytes)


def _row(name: str, place: Place, value: int, upper: int) -> LedgerRow:
    return LedgerRow(name=name, place=place, value=value, upper=upper, origin="prior")
