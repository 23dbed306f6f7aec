"""Commands `lowtide plan upscale` and `plan video`: dry runs for this machine or another device.

Each takes the options of the command whose run it predicts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli import upscale as upscale_command
from lowtide.cli import video as video_command
from lowtide.cli.shell import error_detail, handle_errors, option
from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from lowtide.jobs.upscale.report import UpscaleReport

# Options that have an effect only where files are written.
_EXCLUDED_OPTIONS = ("dry_run", "force", "report", "comparison", "streams", "devices")
_DEVICE = Annotated[
    str,
    option(
        "--device",
        panel="Main",
        help=("auto, cpu, cuda:0, ... or a GPU that need not be present, such as rtx3060-12gb."),
    ),
]

_ALL_DEVICES = Annotated[
    bool,
    option(
        "--all-devices",
        panel="Main",
        help=("Plan for this machine's CPU and for every known GPU, in a table."),
    ),
]


def plan_command(
    run: Callable[..., None], command: Any, help: str, added: Sequence[inspect.Parameter] = ()
) -> Any:
    """Return a command that calls ``run`` with the options of ``command`` and those ``added``."""

    def plan(**given: Any) -> None:
        run(**given)

    shape = inspect.signature(command, eval_str=True)
    kept = [item for name, item in shape.parameters.items() if name not in _EXCLUDED_OPTIONS]
    kept = [item.replace(annotation=_DEVICE) if item.name == "device" else item for item in kept]
    plan.__doc__ = help
    result = handle_errors(plan)
    result.__signature__ = shape.replace(parameters=[*kept, *added])  # pyright: ignore[reportFunctionMemberAccess]
    return result


def _plan(all_devices: bool = False, **given: Any) -> None:
    if not all_devices:
        upscale_command.upscale(**given, dry_run=True)
        return
    if given.get("device", "auto") != "auto":
        raise UsageError("--all-devices and --device contradict each other", hint="drop one")
    _plan_all_devices(given)


def _plan_all_devices(given: dict[str, Any]) -> None:
    from lowtide.jobs.upscale.plan import plan_on_all_devices

    as_json, inputs, output = given.pop("as_json"), given.pop("inputs"), given.pop("output")
    for name in ("quiet", "tile_auto"):
        del given[name]
    reports = plan_on_all_devices(inputs, output or upscale_command.DEFAULT_OUTPUT, **given)
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
    _plan,
    upscale_command.upscale,
    "Predict what upscaling would do and use: reads headers only, writes nothing.",
    [
        inspect.Parameter(
            "all_devices", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_ALL_DEVICES
        )
    ],
)

plan_video = plan_command(
    partial(video_command.video, dry_run=True),
    video_command.video,
    "Predict what upscaling a video would do and use: reads packets, decodes one frame, writes"
    " nothing.",
)
