"""Upscale files and folders within a budget: the job behind command and function."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from lowtide.core.precision import Precision
from lowtide.core.progress import Cancel, ProgressCallback, report_phase
from lowtide.jobs.build_network import copy_network
from lowtide.jobs.devices import budget_share, divide_threads, resolve_devices
from lowtide.jobs.journal import open_journal
from lowtide.jobs.pipeline import Pipeline
from lowtide.jobs.prepare import preload_libraries, prepare
from lowtide.jobs.prepared import Pin
from lowtide.jobs.report import SkippedInput, UpscaleReport, versions
from lowtide.jobs.results import ResultRecorder, refuse_overwriting
from lowtide.jobs.target_size import scale_checker
from lowtide.jobs.upscale_job import UpscaleJob
from lowtide.jobs.upscale_settings import UpscaleSettings
from lowtide.jobs.workers import Workers
from lowtide.media import inspect_image
from lowtide.media.discover import IMAGES, Found, discover
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest
from lowtide.memory.meter import open_meter
from lowtide.memory.plan_file import PlanFile
from lowtide.models.onnx_providers import ProviderName
from lowtide.streaming.planner.model_facts import StrategyName

Inputs = str | Path | Sequence[str | Path]
F = TypeVar("F", bound=Callable[..., Any])


class UpscaleKeywords(TypedDict, total=False):
    """Keywords of the calls that upscale: the fields of `UpscaleSettings`."""

    budget: str | int | Budget
    host_budget: str | int | None
    disk_budget: str | int | None
    scratch: str | Path | None
    device: str
    devices: str | tuple[str, ...] | list[str]
    precision: Literal["auto"] | Precision
    accuracy: AccuracyRequest | None
    plan_file: str | Path | None
    model: str | Path | None
    scale: float | None
    width: int | None
    height: int | None
    max_side: int | None
    format: str | None
    suffix: str
    strategy: StrategyName
    self_ensemble: bool
    compile: Literal["auto", "on", "off"]
    cuda_graphs: bool
    provider: ProviderName
    tile: int | None
    tile_overlap: int | None
    tile_batch_size: int | None
    hann_blend: bool | None
    streams: int
    strip_metadata: bool
    max_pixels: int
    png_compression: int
    jpeg_quality: int
    webp_quality: int
    webp_lossless: bool
    avif_quality: int
    tiff_compression: Literal["none", "lzw", "deflate"]


def show_keywords(call: F) -> F:
    """Decorate a call with ``**settings`` so that its signature shows `UpscaleKeywords`."""
    shape, fields = inspect.signature(call), UpscaleSettings.__dataclass_fields__
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    shown = [
        keyword(name, default=fields[name].default, annotation=annotation)
        for name, annotation in UpscaleKeywords.__annotations__.items()
    ]
    own = [one for one in shape.parameters.values() if one.name != "settings"]
    call.__signature__ = shape.replace(parameters=[*own, *shown])  # pyright: ignore[reportFunctionMemberAccess]
    return call


@show_keywords
def upscale(
    inputs: Inputs,
    output: str | Path,
    *,
    force: bool = False,
    sidecar: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[UpscaleKeywords],
) -> UpscaleReport:
    """Upscale images within a byte budget.

    Results equal the unconstrained run unless the report's accuracy is ``bounded``, and then it
    states the measured error. An image that fails in a batch is reported (``report.failures``) and
    the others are done; the error of a single image is raised. Inputs in folders that are not
    images are in ``report.skipped_inputs``.

    Args:
        inputs: Files, folders (their tree is mirrored) or glob patterns.
        output: A file for one file, unless a folder has that name or a separator ends it, else a
            folder.
        force: Replace files and redo finished work.
        sidecar: Write a report next to each result.
        cancel: Stops the work with `Cancelled`, with no half-written file left.
        settings: Budget, model, target size and all else, as fields of `UpscaleSettings`.

    Raises:
        UsageError: An argument is invalid.
        ImageError: An input cannot be read.
        ModelError: The model cannot be loaded or run.
        BudgetError: Nothing fits the budget.
        OutputError: A file cannot be written.
        Cancelled: ``cancel`` was set.
    """
    started = time.perf_counter()
    chosen = UpscaleSettings.of(**settings)
    plan_file = PlanFile.read(chosen.plan_file) if chosen.plan_file else None
    found, folder = find_jobs(inputs, output, chosen)
    pairs, facts = found.pairs, None
    if folder is None:
        # Fail before a new model is measured, which may take minutes.
        facts = inspect_image(pairs[0].source, max_pixels=chosen.max_pixels)
        refuse_overwriting(pairs[0].target, None, force)
    scratch = Path(chosen.scratch) if chosen.scratch else folder or Path(output).parent
    devices = resolve_devices(chosen.device_names)
    preload_libraries(chosen)
    meter = open_meter(devices[0])
    meter.start()
    try:
        with open_journal(folder) as journal, divide_threads(len(devices)) as threads:
            now = versions(chosen.model_name)
            pin = Pin.read(journal, now)
            budget = min(
                (chosen.parse_budget(device, scratch) for device in dict.fromkeys(devices)),
                key=lambda one: one.device_bytes,
            )
            if pin is not None:
                budget = pin.pinned_budget(chosen.budget, budget)
            share = budget_share(budget, devices)
            prepared = prepare(
                chosen,
                device=devices[0],
                limit_bytes=share.device_bytes // 2,
                known=pin and pin.measured,
                replayed=plan_file and plan_file.first,
                meter=meter,
                progress=progress,
                cancel=cancel,
                on_loaded=scale_checker(pairs, chosen, facts),
            )
            Pin.write(journal, now, budget, prepared.measurements)
            report = UpscaleReport(
                model=prepared.descriptor.to_dict(),
                device=",".join(devices),
                versions=now,
                skipped_inputs=SkippedInput.of(found),
            )
            key = chosen.content_hash(prepared.descriptor.sha256, prepared.precision)
            results = ResultRecorder(pairs, report, journal, key, force=force, sidecar=sidecar)
            if len(devices) == 1 or len(pairs) == 1:
                # A single image stays in this process, which distributes its tiles.
                copies = tuple(copy_network(prepared.network, one) for one in devices[1:])
                prepared = replace(prepared, replicas=copies)
                Pipeline(
                    UpscaleJob(prepared, chosen, budget, plan_file=plan_file, images=len(pairs)),
                    results,
                    meter,
                    progress=progress,
                    cancel=cancel,
                    scratch=scratch,
                    count=len(pairs),
                    streams=chosen.streams,
                    threads=threads * len(devices),
                ).run(results.due_items())
            else:
                job = UpscaleJob(prepared, chosen, share, images=len(pairs))
                workers = Workers(
                    "lowtide.jobs.upscale_job",
                    {device: job.worker_setup(device, share) for device in devices},
                    devices,
                    results,
                    streams=chosen.streams,
                    threads=threads,
                    scratch=scratch,
                    progress=progress,
                )
                del prepared, job  # free this copy: each worker loads the model
                try:
                    workers.run(cancel)
                finally:
                    if journal is not None:
                        journal.remove_parts()  # remove the files of killed workers
    finally:
        meter.stop()
    report.seconds = time.perf_counter() - started
    report_phase(progress, "done")
    return report


def find_jobs(
    inputs: Inputs, output: str | Path, settings: UpscaleSettings
) -> tuple[Found, Path | None]:
    """Return the jobs, and the folder for a journal (None for one file to one file)."""
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    found = discover(
        given, output, kind=IMAGES, format=settings.format, suffix_text=settings.suffix
    )
    return found, None if found.single_file else Path(output)
