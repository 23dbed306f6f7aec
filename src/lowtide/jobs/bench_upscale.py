"""Benchmark of upscaling configurations on one image: time, peak memory and error.

The presets and configurations are those of the guide that users of DRCT follow; the others change
one setting at a time. Each variant runs in a process of its own, twice: the first run also
measures and caches the model's costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lowtide.core.atomic_file import require_distinct
from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.figure_file import new_figure, require_figure_name, save_figure
from lowtide.core.metrics import max_error, psnr
from lowtide.core.progress import Cancel, check_cancel
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.report import reported_db, versions
from lowtide.media import inspect_image
from lowtide.memory.measurement.subprocess_run import measure_in_subprocess

# The exact result that all others are compared with.
REFERENCE = "lowtide"
BASELINE = "conservative"


class BenchVariant(BaseModel):
    """Benchmark variant: a name, a group, and settings of `upscale`."""

    name: str
    group: str
    settings: dict[str, Any] = {}

    @property
    def options(self) -> str:
        """The settings as command-line options."""
        return " ".join(_option(name, value) for name, value in self.settings.items()) or "none"


def _option(name: str, value: Any) -> str:
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{word}" if value else f"--no-{word}"
    return f"--{word} {value}"


def _variants() -> tuple[BenchVariant, ...]:
    half: dict[str, Any] = {"precision": "bf16"}
    groups = {
        "defaults": {REFERENCE: {}},
        "presets": {
            "speed": {**half, "streams": 2, "tile_batch_size": 4},
            "memory": {**half, "tile_batch_size": 1, "tile": 256},
            "quality": {"precision": "fp32", "tile": 512},
            "balanced": {**half, "tile_batch_size": 2, "streams": 2},
        },
        "configurations": {
            BASELINE: _tiles(256, 1, 1, "fp32"),
            "balanced, 512": _tiles(512, 2, 2, "bf16"),
            "aggressive": _tiles(512, 4, 4, "bf16"),
            "maximum": _tiles(1024, 2, 2, "bf16"),
            "256, half": _tiles(256, 1, 1, "bf16"),
            "512, full": _tiles(512, 1, 1, "fp32"),
            "1024, half": _tiles(1024, 1, 1, "bf16"),
        },
        "single options": {
            "whole": {"strategy": "whole"},
            "streamed": {"strategy": "streamed"},
            "whole, half": {"strategy": "whole", **half},
            "streamed, half": {"strategy": "streamed", **half},
            "whole, compiled": {"strategy": "whole", "compile": "on"},
            "tiles, blended": {"tile": 256, "hann_blend": True},
            "tiles, not blended": {"tile": 256, "hann_blend": False},
            "tiles, 4 at once": {"tile": 256, "tile_batch_size": 4},
        },
    }
    return tuple(
        BenchVariant(name=name, group=group, settings=settings)
        for group, ways in groups.items()
        for name, settings in ways.items()
    )


def _tiles(tile: int, batch: int, streams: int, precision: str) -> dict[str, Any]:
    return {"tile": tile, "tile_batch_size": batch, "streams": streams, "precision": precision}


VARIANTS = _variants()


class BenchRow(BaseModel):
    """Result of one benchmark variant, or why it was refused.

    ``cpu_utilization`` is the share of the wall time in which the CPU's threads were busy, None on
    other devices. ``psnr_db`` is that of the file against the reference's, None where both are
    equal, and ``max_error`` the largest difference of a sample. ``speedup`` is the speedup over the
    conservative configuration.
    """

    variant: BenchVariant
    plan: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    cpu_utilization: float | None = None
    peak_bytes: int = 0
    execution: str = ""
    precision: str = ""
    psnr_db: float | None = None
    max_error: int = 0
    speedup: float | None = None
    error: str = ""


class BenchReport(BaseModel):
    """Results of all benchmark variants for one image and model."""

    schema_version: int = SCHEMA_VERSION
    image: str
    width: int
    height: int
    model: str
    device: str
    versions: dict[str, str]
    rows: list[BenchRow] = []


def bench(
    image: str | Path,
    *,
    model: str = "lowtide-x2",
    device: str = "auto",
    budget: str | int = "auto",
    only: Sequence[str] = (),
    plot: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    cancel: Cancel = None,
) -> BenchReport:
    """Benchmark every way to upscale ``image``, or only those named in ``only``.

    The reference and the baseline always run. A variant that the model or the budget does not allow
    is a row that says why.

    Args:
        plot: File to draw time against memory to.

    Raises:
        UsageError: ``only`` has an unknown name.
        LowtideError: The image cannot be read.
    """
    unknown = sorted({*only} - {way.name for way in VARIANTS})
    if unknown:
        raise UsageError(
            f"there is no configuration {unknown[0]!r}",
            hint=" or ".join(repr(way.name) for way in VARIANTS),
        )
    if plot is not None:
        require_figure_name(Path(plot))  # fail before minutes of running
        require_distinct([Path(plot)], [Path(image)])
    facts = inspect_image(Path(image))
    report = BenchReport(
        image=str(image),
        width=facts.info.width,
        height=facts.info.height,
        model=str(model),
        device=device,
        versions=versions(),
    )
    with tempfile.TemporaryDirectory(prefix="lowtide-bench-") as folder:
        reference = Path(folder) / f"{REFERENCE}.png"
        for variant in VARIANTS:
            if only and variant.name not in {*only, REFERENCE, BASELINE}:
                continue
            check_cancel(cancel)
            if progress is not None:
                progress(variant.name)
            target = Path(folder) / f"{variant.name}.png"
            row = _run(variant, Path(image), target, model, device, budget)
            if not row.error and reference.exists():
                row.psnr_db, row.max_error = image_difference(target, reference)
            report.rows.append(row)
    _set_speedups(report.rows)
    if plot is not None:
        _draw(report, Path(plot))
    return report


def _run(
    variant: BenchVariant, image: Path, target: Path, model: str, device: str, budget: str | int
) -> BenchRow:
    # With the default accuracy, tiles that are not exact would be refused.
    asked = {"accuracy": "bounded"} if "tile" in variant.settings else {}
    settings = {
        **variant.settings,
        **asked,
        "model": str(model),
        "device": device,
        "budget": budget,
    }
    try:
        found = measure_in_subprocess(
            "lowtide.jobs.bench_upscale:run_variant", str(image.absolute()), str(target), settings
        ).result
    except LowtideError as error:
        return BenchRow(variant=variant, error=error.message)
    return BenchRow(variant=variant, **found)


def run_variant(image: str, target: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one variant twice in this process and return the figures of the second run."""
    from lowtide.core.heap import tune_heap

    tune_heap()
    from lowtide.jobs.upscale import upscale

    try:
        upscale(image, target, force=True, **settings)
        report = upscale(image, target, force=True, **settings)
    except LowtideError as error:
        return {"error": error.message}
    done = report.images[0]
    assert done.plan is not None and done.memory is not None and done.accuracy is not None
    threads = int(report.versions["threads"])
    on_cpu = done.plan.device == "cpu"
    return {
        "plan": done.plan.title,
        "wall_s": round(done.seconds, 3),
        "cpu_s": round(done.cpu_seconds, 3),
        "cpu_utilization": round(done.cpu_seconds / done.seconds / threads, 3) if on_cpu else None,
        "peak_bytes": done.memory.peak_bytes,
        "execution": done.accuracy.execution,
        "precision": done.plan.precision,
    }


def image_difference(one: Path, other: Path) -> tuple[float | None, int]:
    """Return PSNR in dB and largest sample difference of two 8- or 16-bit image files.

    The PSNR is None if the images are equal.
    """
    import numpy as np

    from lowtide.media import open_image

    pixels = []
    for path in (one, other):
        with open_image(path) as image:
            pixels.append(image.read(0, image.info.height))
    peak = np.iinfo(pixels[0].dtype).max
    return reported_db(psnr(*pixels, peak=peak)), int(max_error(*pixels))


def _set_speedups(rows: list[BenchRow]) -> None:
    slow = next((row for row in rows if row.variant.name == BASELINE and not row.error), None)
    for row in rows:
        if slow is not None and not row.error:
            row.speedup = round(slow.wall_s / row.wall_s, 2)


def _draw(report: BenchReport, path: Path) -> None:
    """Draw every variant as a point: seconds on the x axis, peak memory on the y axis."""
    from lowtide.core.units import MIB

    figure = new_figure(10, 5.2)
    axes = figure.add_subplot()
    for group in dict.fromkeys(row.variant.group for row in report.rows):
        rows = [row for row in report.rows if row.variant.group == group and not row.error]
        axes.scatter(
            [row.wall_s for row in rows], [row.peak_bytes / MIB for row in rows], label=group
        )
        for row in rows:
            axes.annotate(
                row.variant.name,
                (row.wall_s, row.peak_bytes / MIB),
                fontsize=8,
                xytext=(4, 4),
                textcoords="offset points",
            )
    axes.set_xlabel("seconds")
    axes.set_ylabel("peak memory, MiB")
    axes.margins(x=0.12)  # room for the labels
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{report.model}, {report.width}×{report.height}")
    axes.legend()
    save_figure(figure, path)
