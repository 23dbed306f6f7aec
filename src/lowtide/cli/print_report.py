"""Print a job's report as text on stdout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lowtide.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.jobs.engine.report import AccuracyReport, ErrorFigure, JobReport, MemoryReport
    from lowtide.jobs.images.report import ImageReport
    from lowtide.memory.plan import Plan

_FRONT_LINES = 6


def print_report(report: JobReport) -> None:
    """Print each image in a few lines, then counts if there are several images."""
    found = Counter[str]()
    for image in report.items:
        _print_image(image)
        found[image.status] += 1
    if len(report.items) > 1:
        states = ("done", "planned", "skipped", "failed")
        counts = [f"{found[status]} {status}" for status in states if found[status]]
        if report.skipped_inputs:
            counts.append(f"{len(report.skipped_inputs)} not {report.noun}")
        typer.echo(f"{', '.join(counts)} in {format_seconds(report.seconds)}")
    if report.model_choice:
        text = f"{report.model.get('name')}: {report.model_choice}; -m takes another"
        _print_lines([("model", text)])
    if report.process is not None:
        _print_lines([("process", str(report.process))])


def print_skipped_inputs(report: JobReport) -> None:
    """Print on stderr which inputs in folders were left out as not images, and why."""
    from lowtide.media.detect import SkippedFile, skipped_summary

    for line in skipped_summary(
        [SkippedFile(Path(one.path), one.reason) for one in report.skipped_inputs]
    ):
        typer.echo(f"not used: {line}", err=True)


def _print_image(image: ImageReport) -> None:
    if image.status == "skipped":
        typer.echo(f"{image.output}: already finished, skipped")
        _print_lines(image.details())
        return
    if image.status == "failed":
        what = (image.error or "").removeprefix(f"{image.input}: ")
        typer.echo(f"{image.input}: failed: {what}")
        if image.hint and image.smallest_bytes is None:  # budgets are summed up at the end
            typer.echo(f"  hint       {image.hint}")
        return
    typer.echo(f"{image.input} → {image.output}  {image.size}")
    lines = image.details()
    if image.plan is not None:
        lines += _plan_lines(image.plan)
        if image.status == "planned":
            lines += _alternative_lines(image.plan)
    if image.accuracy is not None:
        lines += _accuracy_lines(image.accuracy)
    if image.memory is not None:
        lines.append(("memory", memory_line(image.memory)))
    if image.status == "done":
        lines.append(
            (
                "time",
                f"{format_seconds(image.seconds)} ({image.pace}),"
                f" {format_seconds(image.cpu_seconds)} of CPU time",
            )
        )
    lines += [("note", note) for note in image.notes]
    lines += [("event", event) for event in image.events]
    _print_lines(lines)


def _print_lines(lines: list[tuple[str, str]]) -> None:
    for name, text in lines:
        typer.echo(f"  {name:<10} {text}")


def _plan_lines(plan: Plan) -> list[tuple[str, str]]:
    rows = [("plan", plan.choice)]
    rows += [("rejected", f"{refusal.title}: {refusal.reason}") for refusal in plan.refused]
    parts = (f"{row.name} {format_bytes(row.value)}" for row in plan.ledger if row.value)
    rows.append(("ledger", ", ".join(parts)))
    return rows


def _alternative_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return trade-offs of memory and time, thinned to a few, the chosen one marked."""
    step = -(-len(plan.pareto_front) // _FRONT_LINES)
    kept = [
        point for index, point in enumerate(plan.pareto_front) if index % step == 0 or point.chosen
    ]
    return [
        (
            "option",
            f"{format_bytes(point.upper_bytes):>9} {format_seconds(point.seconds):>8}"
            f"  {point.title}, {point.accuracy}{'  ← this plan' if point.chosen else ''}",
        )
        for point in kept
    ]


def _accuracy_lines(accuracy: AccuracyReport) -> list[tuple[str, str]]:
    text = f"{accuracy.execution}: {accuracy.reason}"
    rows = [("accuracy", text)]
    if accuracy.execution_error is not None:
        rows.append(("error", _error_text(accuracy.execution_error)))
    precision = accuracy.precision
    if accuracy.precision_note:
        precision += f", {accuracy.precision_note}"
    if accuracy.precision_error is not None:
        precision += f": {_error_text(accuracy.precision_error)}"
    rows.append(("precision", precision))
    return rows


def _error_text(error: ErrorFigure) -> str:
    level = "no difference" if error.psnr_db is None else f"at least {error.psnr_db:.1f} dB"
    return (
        f"{level}, largest {error.max_error * 255:.2f} of 255, against {error.reference}"
        f" ({error.tiles_sampled} of {error.tiles_total} tiles measured)"
    )


def memory_line(memory: MemoryReport) -> str:
    """Return the measured peak, the budget, and what was expected."""
    checking = ""
    if memory.measurement_peak_bytes is not None:
        checking = f"; {format_bytes(memory.measurement_peak_bytes)} while measuring the error"
    verdict = "" if memory.within_budget else " OVER THE BUDGET"
    return (
        f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(memory.budget_bytes)}{verdict}"
        f" (expected {format_bytes(memory.predicted_bytes)},"
        f" at most {format_bytes(memory.upper_bytes)}){checking}"
    )
