"""Export a model to ONNX, compare it with PyTorch, and keep it only if both agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from lowtide.core.atomic_file import (
    atomic_output,
    require_name,
    require_output,
    require_replaceable,
)
from lowtide.core.errors import ModelError, UsageError
from lowtide.jobs.engine.report import reported_db
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.export import calibration_images
from lowtide.jobs.export.report import ExportReport, ExportTiming, SizeCheckReport
from lowtide.jobs.export.settings import ExportKeywords, ExportSettings
from lowtide.models.export import (
    CannotRunError,
    ExportPrecision,
    OnnxRunner,
    SizeCheck,
    checked_sizes,
    compare_fp32,
    compare_int8,
    cpu_seconds,
    quantize_onnx,
    require_level_input,
    require_packages,
    write_metadata,
    write_onnx,
)
from lowtide.models.loaded_model import Model
from lowtide.models.loader import load

if TYPE_CHECKING:
    from torch import nn

SUFFIX = ".onnx"


@show_keywords(ExportSettings, ExportKeywords)
def export_onnx(
    model: str | Path,
    output: str | Path,
    *,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
    **settings: Unpack[ExportKeywords],
) -> ExportReport:
    """Export ``model`` to ONNX and compare the file's results with PyTorch's.

    The file takes ``image`` (1, C, H, W) in 0..1 and returns ``result``, not clamped, for all
    heights and widths that the model takes. A denoiser's file also takes ``sigma`` (1,), the level
    of white noise as a standard deviation of values in 0..1. ONNX Runtime's CPU provider runs it at
    several sizes, a denoiser's at several levels; the file is kept only if each result is close to
    PyTorch's.

    An int8 file is calibrated on every other photograph of ``calibrate`` and compared on the rest;
    a single photograph is split into its upper and its lower half; fewer than four are noted in the
    report. The int8 file is not equal to PyTorch, and is kept if its PSNR is at least 40 dB.

    Args:
        model: Name of a bundled model, or a file.
        output: The .onnx file.
        force: Replace ``output``.
        progress: Called with the name of each step.
        settings: Precision, calibration and all else, as fields of `ExportSettings`. The metadata
            of a file that is kept ``unchecked`` say so.

    Raises:
        ModelError: The model cannot be exported, or the file cannot be run or returns other values.
        OutputError: The file cannot be written.
        UsageError: A package is missing, or ``output`` exists and ``force`` is not set.
    """
    target = _target(output, force=force)
    chosen = ExportSettings.of(**settings)
    precision, opset, unchecked = chosen.precision, chosen.opset, chosen.unchecked
    photographs = calibration_images.find_photographs(chosen.calibrate)
    runs = not unchecked or precision == "int8"
    require_packages("onnx", "onnxscript", *(("onnxruntime",) if runs else ()))
    report_step = progress or (lambda step: None)
    loaded = load(model)
    require_level_input(loaded, precision)
    with atomic_output(
        target, replace=force
    ) as part:  # fail before the export if it cannot be written
        if precision == "int8":
            write_onnx(loaded, part, opset=opset, progress=report_step)
            found = _quantize_and_compare(loaded, part, photographs, report_step)
        else:
            network = write_onnx(
                loaded, part, precision=precision, opset=opset, progress=report_step
            )
            found = _compare_if_runnable(
                loaded, network, part, precision, report_step, unchecked=unchecked
            )
        write_metadata(part, loaded, precision=precision, checked=found["checked"])
    facts = loaded.descriptor
    return ExportReport(
        model=facts.name,
        architecture=facts.architecture,
        scale=facts.scale,
        parameters=facts.parameters,
        file=str(target),
        file_bytes=target.stat().st_size,
        opset=opset,
        precision=precision,
        **found,
    )


def _quantize_and_compare(
    model: Model, part: Path, photographs: list[Path], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Quantize the fp32 file to int8 and return fields of the report.

    Raises `ModelError` unless the file may be kept.
    """
    sizes = checked_sizes(model.descriptor.size)
    crops = calibration_images.evaluation_crops(photographs, model, sizes)
    try:
        progress("calibrating int8 on the photographs")
        quantize_onnx(part, calibration_images.calibration_crops(photographs, model))
        run = OnnxRunner(part)
        progress("comparing with PyTorch on the other photographs")
        checks = [compare_int8(run, model, picture) for picture in crops]
    except CannotRunError as error:
        raise ModelError(
            f"{model.descriptor.name} is not exported: ONNX Runtime cannot run it in int8:"
            f" {error.message}",
            hint="--precision fp32",
        ) from error
    notes = calibration_images.photograph_notes(photographs)
    return {**_require_close(model, checks, run, model.module), "notes": notes}


def _compare_if_runnable(
    model: Model,
    network: nn.Module,
    part: Path,
    precision: ExportPrecision,
    progress: Callable[[str], None],
    *,
    unchecked: bool,
) -> dict[str, Any]:
    """Run the file at several sizes and return fields of the report.

    Raises `ModelError` unless the file may be kept.
    """
    try:
        require_packages("onnxruntime")
    except UsageError as error:
        # Only with `unchecked`: otherwise the export has already failed for lack of the runtime.
        return {"checked": False, "unchecked_reason": error.message}
    try:
        return _compare_sizes(model, network, OnnxRunner(part), progress)
    except CannotRunError as error:
        why = f"ONNX Runtime's CPU provider cannot run it in {precision}: {error.message}"
        if unchecked:
            return {"checked": False, "unchecked_reason": why}
        hint = "--unchecked keeps the file without a check"
        hint += "" if precision == "fp32" else ", --precision fp32 writes one that can be checked"
        raise ModelError(f"{model.descriptor.name} is not exported: {why}", hint=hint) from error


def _compare_sizes(
    model: Model, network: nn.Module, runner: OnnxRunner, progress: Callable[[str], None]
) -> dict[str, Any]:
    checks = []
    for height, width in checked_sizes(model.descriptor.size):
        progress(f"comparing with PyTorch at {width}×{height}")
        checks.append(compare_fp32(runner, model, network, (height, width)))
    return _require_close(model, checks, runner, network)


def _require_close(
    model: Model, checks: Sequence[SizeCheck], runner: OnnxRunner, network: nn.Module
) -> dict[str, Any]:
    """Check and time a file that was run, and return fields of the report.

    Raises `ModelError` if a result is not close enough to PyTorch's.
    """
    for one in checks:
        if not one.passed:
            raise _mismatch_error(model, one)
    # A medium size: in small ones the overhead of calls dominates, large ones take long.
    sizes = sorted({(one.height, one.width) for one in checks}, key=math.prod)
    timed = sizes[len(sizes) // 2]
    seconds = cpu_seconds(runner, model, network, timed)
    timing = ExportTiming(
        height=timed[0], width=timed[1], onnxruntime_seconds=seconds[0], torch_seconds=seconds[1]
    )
    return {"checked": True, "sizes": tuple(map(_size_report, checks)), "timing": timing}


def _mismatch_error(model: Model, check: SizeCheck) -> ModelError:
    size, name = f"{check.width}×{check.height}", model.descriptor.name
    if check.bound is None:
        return ModelError(
            f"{name} is not exported: at {size} the file's PSNR against PyTorch in fp32"
            f" is {check.psnr_db:.1f} dB, less than {check.min_psnr_db:.0f} dB",
            hint="--precision fp16, or more and other photographs for --calibrate",
        )
    return ModelError(
        f"{name} is not exported: at {size} the file's result differs by"
        f" {check.difference:.2g} from PyTorch's, more than {check.bound:.2g}",
        hint="try the other --opset, or --precision fp32 if it was another",
    )


def _size_report(check: SizeCheck) -> SizeCheckReport:
    fields = vars(check)
    decibels = None if check.psnr_db is None else reported_db(check.psnr_db)
    return SizeCheckReport(**{**fields, "psnr_db": decibels})


def _target(output: str | Path, *, force: bool) -> Path:
    require_name(output)
    target = Path(output)
    require_replaceable(target)  # a folder has no suffix
    if target.suffix.lower() != SUFFIX:
        raise UsageError(
            f"{target} does not end in {SUFFIX}", hint=f"-o {target.with_suffix(SUFFIX)}"
        )
    require_output(target, force=force)
    return target
