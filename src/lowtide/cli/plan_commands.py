"""Commands `lowtide plan JOB`: what a job would do, on this machine or on another device.

Each takes the options of the command whose run it predicts.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli import denoise as denoise_command
from lowtide.cli import upscale as upscale_command
from lowtide.cli import video as video_command
from lowtide.cli.common_options import option
from lowtide.cli.image_command import named_output
from lowtide.cli.shell import error_detail, report_errors
from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from lowtide.jobs.upscale.report import UpscaleReport

_WRITING = (
    "An output that the run would refuse is refused here too. --report writes the plan of each"
    " input, next to where its result would be."
)
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

    All but ``--dry-run`` are taken, so that "plan" may stand before any job's words: what the job
    would refuse for what it writes, its plan refuses too, and with ``--report`` the plan of each
    input is written where the report on its result would be.
    """

    def plan(all_devices: bool = False, **given: Any) -> None:
        given["dry_run"] = True
        if all_devices:
            _plan_all_devices(given)
        else:
            command(**given)

    shape = inspect.signature(command, eval_str=True)
    plan.__doc__ = f"{help}\n\n{_WRITING}"
    result = report_errors(plan)
    kept = [_parameter(one) for name, one in shape.parameters.items() if name != "dry_run"]
    result.__signature__ = shape.replace(parameters=[*kept, *added])  # pyright: ignore[reportFunctionMemberAccess]
    return result


def _parameter(one: inspect.Parameter) -> inspect.Parameter:
    """Return an option of a job as its plan has it."""
    return one.replace(annotation=_DEVICE) if one.name == "device" else one


def _plan_all_devices(given: dict[str, Any]) -> None:
    from lowtide.jobs.upscale.plan import plan_on_all_devices

    if given["device"] != "auto":
        raise UsageError("--all-devices and --device contradict each other", hint="drop one")
    if given["report"]:
        raise UsageError("--all-devices has a table of plans, no --report", hint="--json")
    given["output"] = named_output(given["output"], "upscaled/", given)
    as_json = given.pop("as_json")
    for name in ("quiet", "tile_auto", "report", "dry_run"):
        given.pop(name)
    reports = plan_on_all_devices(**given)
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
    "Predict what upscaling would do and use: reads headers only, writes no result.",
    _ALL_DEVICES,
)
plan_denoise = plan_command(
    denoise_command.denoise,
    "Predict what denoising would do and use: estimates noise levels, writes no result.",
)
plan_video = plan_command(
    video_command.video,
    "Predict what upscaling a video would do and use: reads packets, decodes one frame, writes no"
    " result.",
)
