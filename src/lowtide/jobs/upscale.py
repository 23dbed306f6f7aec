"""Upscale files and folders within a budget: the job behind command and function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from lowtide.core.precision import Precision
from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.jobs.image_run import Inputs, run_images
from lowtide.jobs.report import UpscaleReport
from lowtide.jobs.upscale_job import UpscaleJob
from lowtide.jobs.upscale_settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest
from lowtide.models.onnx_providers import ProviderName
from lowtide.streaming.planner.model_facts import StrategyName

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
    chosen = UpscaleSettings.of(**settings)
    return run_images(
        UpscaleJob,
        chosen,
        inputs,
        output,
        force=force,
        sidecar=sidecar,
        progress=progress,
        cancel=cancel,
    )
