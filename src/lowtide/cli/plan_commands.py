"""Commands `lowtide plan JOB`: what a job would do, on this machine or on another device.

Each takes the options of the command whose run it predicts.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lowtide.cli import denoise as denoise_command
from lowtide.cli import upscale as upscale_command
from lowtide.cli import video as video_command
from lowtide.cli.common_options import option
from lowtide.cli.shell import error_detail, report_errors
from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from lowtide.jobs.upscale.report import UpscaleReport

# Options of what is written, which a plan takes and does not show.
_WRITING = ("force", "report", "comparison", "reference")
_DEVICE = Annotated[
    str,
    option(
        "--device",
        panel="Main",
        help="auto, cpu, cuda:0, ... or a GPU that need not be present, such as rtx3060-12gb.",
    ),
]
_ALL_DEVICES = inspect.Parameter(
    "all_devices",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        option(
            "--all-devices",
            panel="Main",
            help="Plan for this machine's CPU and for every known GPU, in a table.",
        ),
    ],
)


def plan_command(command: Any, help: str, *added: inspect.Parameter) -> Any:
    """Return the command that plans what ``command`` does, with its options and those ``added``.

    All but ``--dry-run`` are taken, so that "plan" may stand before any job's words.
    """

    def plan(all_devices: bool = False, **given: Any) -> None:
        if all_devices:
            _plan_all_devices(given)
        else:
            command(**given, dry_run=True)

    shape = inspect.signature(command, eval_str=True)
    plan.__doc__ = help
    result = report_errors(plan)
    kept = [_parameter(one) for name, one in shape.parameters.items() if name != "dry_run"]
    result.__signature__ = shape.replace(parameters=[*kept, *added])  # pyright: ignore[reportFunctionMemberAccess]
    return result


def _parameter(one: inspect.Parameter) -> inspect.Parameter:
    """Return an option of a job as its plan has it."""
    if one.name == "device":
        return one.replace(annotation=_DEVICE)
    if one.name not in _WRITING:
        return one
    kind, shown = get_args(one.annotation)
    hidden = copy.copy(shown)
    hidden.hidden = True
    return one.replace(annotation=Annotated[kind, hidden])


def _plan_all_devices(given: dict[str, Any]) -> None:
    from lowtide.jobs.upscale.plan import plan_on_all_devices

    if given["device"] != "auto":
        raise UsageError("--all-devices and --device contradict each other", hint="drop one")
    as_json, inputs, output = given.pop("as_json"), given.pop("inputs"), given.pop("output")
    for name in ("quiet", "tile_auto", *_WRITING):
        given.pop(name, None)
    reports = plan_on_all_devices(inputs, output or "upscaled/", **given)
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


plan_upscale = plan_command(
    upscale_command.upscale,
    "Predict what upscaling would do and use: reads headers only, writes nothing.",
    _ALL_DEVICES,
)
plan_denoise = plan_command(
    denoise_command.denoise,
    "Predict what denoising would do and use: estimates noise levels, writes nothing.",
)
plan_video = plan_command(
    video_command.video,
    "Predict what upscaling a video would do and use: reads packets, decodes one frame, writes"
    " nothing.",
)
