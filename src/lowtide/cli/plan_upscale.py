"""Command `lowtide plan upscale`: dry run for this machine or another device.

Takes the options of `lowtide upscale`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli import upscale as command
from lowtide.cli.plan_command import plan_command
from lowtide.cli.shell import error_detail, option
from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from lowtide.jobs.report import UpscaleReport

_ALL_DEVICES = Annotated[
    bool,
    option(
        "--all-devices",
        panel="Main",
        help=("Plan for this machine's CPU and for every known GPU, in a table."),
    ),
]


def _plan(all_devices: bool = False, **given: Any) -> None:
    if not all_devices:
        command.upscale(**given, dry_run=True)
        return
    if given.get("device", "auto") != "auto":
        raise UsageError("--all-devices and --device contradict each other", hint="drop one")
    _plan_all_devices(given)


def _plan_all_devices(given: dict[str, Any]) -> None:
    from lowtide.jobs.plan_upscale import plan_on_all_devices

    as_json, inputs, output = given.pop("as_json"), given.pop("inputs"), given.pop("output")
    for name in ("quiet", "tile_auto"):
        del given[name]
    reports = plan_on_all_devices(inputs, output or command.DEFAULT_OUTPUT, **given)
    if as_json:
        import json

        plain = {
            name: {"error": error_detail(report)}
            if isinstance(report, LowtideError)
            else report.model_dump(mode="json")
            for name, report in reports.items()
        }
        document = {"schema_version": SCHEMA_VERSION, "devices": plain}
        typer.echo(json.dumps(document, indent=2))
        return
    for line in _table(reports):
        typer.echo(line)


def _table(reports: dict[str, UpscaleReport | LowtideError]) -> list[str]:
    from lowtide.core.units import format_bytes, format_seconds

    rows = [("device", "budget", "expected", "at most", "time", "precision", "plan")]
    for name, report in reports.items():
        if isinstance(report, LowtideError):
            rows.append((name, "", "", "", "", "", report.message))
            continue
        for image in report.images:
            if image.plan is None:
                rows.append((name, "", "", "", "", "", image.error or ""))
                continue
            plan = image.plan
            rows.append(
                (
                    name,
                    format_bytes(plan.budget_bytes),
                    format_bytes(plan.predicted_bytes),
                    format_bytes(plan.upper_bytes),
                    format_seconds(plan.seconds),
                    plan.precision,
                    f"{plan.title}, {plan.accuracy}",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        + "  "
        + row[-1]
        for row in rows
    ]


plan = plan_command(
    _plan,
    command.upscale,
    "Predict what upscaling would do and use: reads headers only, writes nothing.",
    [
        inspect.Parameter(
            "all_devices", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_ALL_DEVICES
        )
    ],
)
