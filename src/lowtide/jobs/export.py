"""A model as a file for another runtime: written, compared, and kept only if it gives the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import nn

from lowtide._version import __version__
from lowtide.core.errors import ModelError, OutputError, UsageError
from lowtide.core.units import format_bytes
from lowtide.jobs.report import reported_db
from lowtide.models.export import (
    CannotRunError,
    ExportPrecision,
    OnnxRunner,
    SizeCheck,
    checked_sizes,
    compare,
    label,
    processor_seconds,
    require_packages,
    write_onnx,
)
from lowtide.models.loader import load
from lowtide.models.model import Model

SUFFIX = ".onnx"


class SizeReport(BaseModel):
    """One size that was compared, in pixels; see `lowtide.models.export.SizeCheck`."""

    height: int
    width: int
    difference: float
    bound: float
    own_difference: float | None = None
    psnr_db: float | None = None  # None also where there is no difference at all


class Timing(BaseModel):
    """Processor seconds for one image of this many pixels."""

    height: int
    width: int
    onnxruntime_seconds: float
    torch_seconds: float


class ExportReport(BaseModel):
    """What was exported, and how far it is from PyTorch in fp32.

    Without a check ``sizes`` is empty, ``timing`` None, and ``unchecked_why`` the reason.
    """

    schema_version: Literal[1] = 1
    lowtide: str = __version__
    torch: str = str(torch.__version__)
    model: str
    architecture: str
    scale: int
    parameters: int
    file: str
    bytes: int
    opset: int
    precision: ExportPrecision
    checked: bool
    unchecked_why: str = ""
    sizes: tuple[SizeReport, ...] = ()
    timing: Timing | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.file}: {format_bytes(self.bytes)}, opset {self.opset}, {self.precision}",
            f"  {'model':<10} {self.model}, {self.architecture} ×{self.scale},"
            f" {self.parameters:,} parameters",
        ]
        if not self.checked:
            return "\n".join([*lines, f"  {'checked':<10} no: {self.unchecked_why}"])
        for index, one in enumerate(self.sizes):
            lines.append(f"  {'' if index else 'checked':<10} {_size_line(one)}")
        if self.timing is not None:
            lines.append(f"  {'processor':<10} {_timing_line(self.timing)}")
        return "\n".join(lines)


def export_onnx(
    model: str | Path, output: str | Path, *, precision: ExportPrecision = "fp32",
    opset: int = 23, force: bool = False, unchecked: bool = False,
) -> ExportReport:  # fmt: skip
    """Write ``model``, a bundled name or a file, to ``output`` as ONNX and compare the two.

    The file takes ``image`` (1, C, H, W) in 0..1 and gives ``result``, unclamped, for all heights
    and widths that the model takes. ONNX Runtime's CPU provider runs it at several sizes, and only
    if each result is near that of PyTorch is it kept. ``unchecked`` keeps one that cannot be run
    here too, which its metadata then say.

    Raises `ModelError` for a model that cannot be exported, and for a file that cannot be run or
    gives something else; `OutputError` where it cannot be written; `UsageError` for missing
    packages, and for an ``output`` that exists unless ``force`` is set.
    """
    target = _target(output, force=force)
    require_packages("onnx", "onnxscript", *(() if unchecked else ("onnxruntime",)))
    loaded = load(model)
    part = _part(target)
    try:
        network = write_onnx(loaded, part, precision=precision, opset=opset)
        found = _check(loaded, network, part, precision, unchecked=unchecked)
        label(part, loaded, precision=precision, checked=found["checked"])
        part.replace(target)
    except OSError as error:
        raise _output_error(target, error) from error
    finally:
        part.unlink(missing_ok=True)
    facts = loaded.descriptor
    return ExportReport(
        model=facts.name, architecture=facts.architecture, scale=facts.scale,
        parameters=facts.parameters, file=str(target), bytes=target.stat().st_size, opset=opset,
        precision=precision, **found,
    )  # fmt: skip


def _check(
    model: Model, network: nn.Module, part: Path, precision: ExportPrecision, *, unchecked: bool
) -> dict[str, Any]:  # fmt: skip
    """Fields of the report; raises `ModelError` unless the file may be kept."""
    try:
        require_packages("onnxruntime")
    except UsageError as error:
        # Without `unchecked` it was asked for before the export.
        return {"checked": False, "unchecked_why": error.message}
    try:
        return _compared(model, network, OnnxRunner(part))
    except CannotRunError as error:
        why = f"ONNX Runtime's CPU provider cannot run it in {precision}: {error.message}"
        if unchecked:
            return {"checked": False, "unchecked_why": why}
        hint = "--unchecked keeps the file without a check"
        hint += "" if precision == "fp32" else ", --precision fp32 writes one that can be checked"
        raise ModelError(f"{model.descriptor.name} is not exported: {why}", hint=hint) from error


def _compared(model: Model, network: nn.Module, run: OnnxRunner) -> dict[str, Any]:
    sizes = checked_sizes(model.descriptor.size)
    checks = [compare(run, model, network, size) for size in sizes]
    for one in checks:
        if not one.good:
            raise ModelError(
                f"{model.descriptor.name} is not exported: at {one.width}×{one.height} the file's"
                f" result is {one.difference:.2g} from PyTorch's, more than {one.bound:.2g}",
                hint="try the other --opset, and --precision fp32 unless it was that",
            )
    # Neither so small that calls count, nor so large that it takes long.
    timed = sorted(sizes, key=math.prod)[len(sizes) // 2]
    seconds = processor_seconds(run, model, network, timed)
    timing = Timing(
        height=timed[0], width=timed[1], onnxruntime_seconds=seconds[0], torch_seconds=seconds[1]
    )
    return {"checked": True, "sizes": tuple(map(_reported, checks)), "timing": timing}


def _reported(check: SizeCheck) -> SizeReport:
    fields = vars(check)
    decibels = None if check.psnr_db is None else reported_db(check.psnr_db)
    return SizeReport(**{**fields, "psnr_db": decibels})


def _size_line(one: SizeReport) -> str:
    text = f"{one.width}×{one.height}: {one.difference:.1e} from PyTorch in fp32"
    if one.own_difference is None:
        return text
    decibels = "equal" if one.psnr_db is None else f"{one.psnr_db:.1f} dB"
    return f"{text}, {decibels}; PyTorch at this precision {one.own_difference:.1e}"


def _timing_line(timing: Timing) -> str:
    return (
        f"{timing.width}×{timing.height}: {timing.onnxruntime_seconds:.3f} s by ONNX Runtime,"
        f" {timing.torch_seconds:.3f} s by PyTorch"
    )


def _target(output: str | Path, *, force: bool) -> Path:
    target = Path(output)
    if target.is_dir():
        raise OutputError(f"{target}: this is a folder", hint=f"give a file name in it, {SUFFIX}")
    if target.suffix.lower() != SUFFIX:
        raise UsageError(
            f"{target} does not end in {SUFFIX}", hint=f"-o {target.with_suffix(SUFFIX)}"
        )
    if target.exists() and not force:
        raise UsageError(f"{target} exists already", hint="--force to replace it")
    return target


def _part(target: Path) -> Path:
    """An empty file beside the target: what cannot be written is known before the export."""
    part = target.with_name(f".{target.name}.lowtide.part")
    try:
        part.open("wb").close()
    except OSError as error:
        raise _output_error(target, error) from error
    return part


def _output_error(target: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{target}: cannot be written ({error.strerror or error})",
        hint="name a file in a folder that exists, may be written to and has space",
    )
