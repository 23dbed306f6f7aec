"""Command `lowtide bench upscale`: ways to upscale one picture, measured on this machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.common_options import JsonReport, option
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes, format_seconds
from lowtide.jobs.images.settings import ImageSettings

if TYPE_CHECKING:
    from lowtide.jobs.images.report import ImageReport

REFERENCE, BASELINE = "lowtide", "conservative"
# Options of `lowtide upscale`, in the order of the runs: bf16 is last, since processors without
# units for it take long. The last three and the baseline are those that users of DRCT know.
WAYS = {
    REFERENCE: "--precision fp32",
    BASELINE: "--tile 256 --tile-batch-size 1 --streams 1 --precision fp32",
    "whole": "--strategy whole --precision fp32",
    "streamed": "--strategy streamed --precision fp32",
    "tiled": "--strategy tiled --precision fp32",
    "default": "",  # fp32 on a CPU
    "balanced": "--tile 512 --tile-batch-size 2 --streams 2 --precision bf16",
    "aggressive": "--tile 512 --tile-batch-size 4 --streams 4 --precision bf16",
    "maximum": "--tile 1024 --tile-batch-size 2 --streams 2 --precision bf16",
}
_LINE = "{:<13}{:>8} {:>8} {:>9} {:>8}  {:<22} {}"
_MAIN, _MODEL = "Main", "lowtide-x2"
# Settings that all ways have.
_FORWARDED = "model device budget"
Row = dict[str, Any]


@report_errors
@with_settings(ImageSettings, f"image {_FORWARDED}", only=_FORWARDED)
def upscale(
    image: Annotated[Path, typer.Argument(help="An image file; a small one takes less time.")],
    only: Annotated[
        list[str] | None,
        option(
            panel=_MAIN,
            metavar="NAME",
            help=f"Besides the first two, one of {', '.join([*WAYS][2:])}; may be repeated.",
        ),
    ] = None,
    as_json: JsonReport = False,
    **settings: Any,
) -> None:
    """Measure time, memory and accuracy of ways to upscale an image on this machine.

    First what lowtide upscale chooses in fp32, with whose result the others are compared, and the
    conservative tiles of DRCT's guide, whose time they are compared with. Then each strategy, what
    runs without options, and that guide's configurations in bf16. Each is planned in one process
    and measured in another, by lowtide-x2 unless -m names another model, in the same budget each.
    Nothing is written.
    """
    from lowtide.media import inspect_image

    if unknown := sorted({*(only or ())} - {*WAYS}):
        raise UsageError(f"there is no way {unknown[0]!r}", hint=f"one of {', '.join(WAYS)}")
    inspect_image(image)  # fail before any process starts
    model = settings["model"] or _MODEL
    words = ["-m", model, "--device", settings["device"], "--budget", settings["budget"]]
    words += ["--", str(image)]
    rows: list[Row] = []
    if not as_json:
        typer.echo(_LINE.format("", "time", "CPU", "peak", "speedup", "against lowtide", "plan"))
    with tempfile.TemporaryDirectory(prefix="lowtide-bench-") as folder:
        for name in WAYS:
            if only and name not in {*only, REFERENCE, BASELINE}:
                continue
            typer.echo(f"running {name}", err=True)
            rows.append(_row(name, words, Path(folder), rows))
            if name == REFERENCE:
                continue  # its speedup is not known yet
            for row in rows if name == BASELINE else rows[-1:]:
                if "seconds" in row and "seconds" in rows[1]:
                    row["speedup"] = round(rows[1]["seconds"] / row["seconds"], 2)
                if not as_json:
                    _print_row(row)
    if as_json:
        from lowtide.jobs.engine.report import versions_used

        facts = {"image": str(image), "model": model, "versions": versions_used(model)}
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, **facts, "rows": rows}, indent=2))


def _row(name: str, words: list[str], folder: Path, rows: list[Row]) -> Row:
    """Run a way, unless one of ``rows`` had the same plan; its row has the reason if it fails."""
    row = {"name": name, "options": WAYS[name]}
    reference, target = (folder / f"{one}.png" for one in (REFERENCE, name))
    words = [*WAYS[name].split(), "-o", str(target), *words]
    try:
        # What planning measures and proves is stored: the run's time is without it.
        planned = _plan_facts(_upscale("--dry-run", *words))
        if same := next((one for one in rows if planned.items() <= one.items()), None):
            return {**same, **row, "same_as": same["name"]}
        done = _upscale(*words)
    except LowtideError as error:
        if name == REFERENCE and isinstance(error, UsageError):
            raise  # of the model or the device, for any other way too
        return {**row, "error": error.message}
    assert done.memory is not None and done.accuracy is not None
    row |= _plan_facts(done)
    row |= {"seconds": round(done.seconds, 3), "cpu_seconds": round(done.cpu_seconds, 3)}
    row |= {"peak_bytes": done.memory.peak_bytes, "execution": done.accuracy.execution}
    return row | (_difference(target, reference) if reference.exists() else {})


def _plan_facts(image: ImageReport) -> Row:
    plan = image.plan
    assert plan is not None
    strategy = plan.strategy.model_dump(mode="json")
    return {
        "plan": plan.title,
        "strategy": strategy,
        "device": plan.device,
        "precision": plan.precision,
    }


def _upscale(*words: str) -> ImageReport:
    """Run `lowtide upscale` in a process of its own, which Ctrl-C here ends too.

    Raises `LowtideError` with the reason if it fails: a `UsageError` if not because of the image.
    """
    from lowtide.jobs.images.report import ImageReport

    done = subprocess.run(
        [sys.executable, "-P", "-m", "lowtide", "upscale", "--json", "--quiet", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().rpartition("\n")[2]
        raise LowtideError(f"ended with status {done.returncode} {said}".rstrip()) from None
    error, images = report.get("error"), report.get("images")
    if error and images:
        raise LowtideError(images[0]["error"])
    if error:
        kind = UsageError if error["exit_code"] == UsageError.exit_code else LowtideError
        raise kind(error["message"], hint=error["hint"])
    return ImageReport.model_validate(images[0])


def _difference(one: Path, other: Path) -> Row:
    """Return the PSNR in dB, None where both files are equal, and the largest difference."""
    import pyvips

    first, second = (
        pyvips.Image.new_from_file(str(path), access="sequential") for path in (one, other)
    )
    _, most, _, _, mean = ((first - second) ** 2).stats().numpy()[0, :5]
    peak = 65535 if first.format == "ushort" else 255
    decibels = round(10 * math.log10(peak**2 / mean), 2) if most else None
    return {"psnr_db": decibels, "max_error": round(math.sqrt(most))}


def _print_row(row: Row) -> None:
    if "error" in row:
        typer.echo(f"{row['name']:<13}refused: {row['error']}")
        return
    close = f"{row.get('psnr_db')} dB, at most {row.get('max_error')}"
    if not row.get("max_error"):
        close = "identical" if "max_error" in row else "not compared"
    times = (format_seconds(row[key]) for key in ("seconds", "cpu_seconds"))
    speedup = f"{row['speedup']:.2f}×" if "speedup" in row else "–"
    plan = f"{row['plan']}, {row['precision']}"
    plan += f", as {row['same_as']}" if "same_as" in row else ""
    peak = format_bytes(row["peak_bytes"])
    typer.echo(_LINE.format(row["name"], *times, peak, speedup, close, plan))
