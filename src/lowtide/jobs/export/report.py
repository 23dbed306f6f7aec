"""Report of an export, as data and as text."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

from pydantic import BaseModel, Field

from lowtide._version import __version__
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes
from lowtide.jobs.export.settings import FilePrecision


class SizeCheckReport(BaseModel):
    """Comparison with PyTorch at one image size.

    Sizes are in pixels; see `lowtide.models.export.SizeCheck`.
    """

    height: int
    width: int
    difference: float
    bound: float | None
    pytorch_difference: float | None = None
    psnr_db: float | None = None  # None also where there is no difference
    min_psnr_db: float | None = None
    sigma: float | None = None  # the level that a denoiser was given


class ExportTiming(BaseModel):
    """Processor seconds for one image of this many pixels."""

    height: int
    width: int
    onnxruntime_seconds: float
    torch_seconds: float


class ExportReport(BaseModel):
    """What was exported, and its difference from PyTorch in fp32.

    Without a check ``sizes`` is empty, ``timing`` None, and ``unchecked_reason`` the reason.
    ``notes`` state what makes the figures less certain than they look.
    """

    schema_version: int = SCHEMA_VERSION
    lowtide: str = __version__
    torch: str = Field(default_factory=partial(version, "torch"))
    model: str
    architecture: str
    scale: int
    parameters: int
    file: str
    file_bytes: int
    opset: int
    precision: FilePrecision
    checked: bool
    unchecked_reason: str = ""
    sizes: tuple[SizeCheckReport, ...] = ()
    timing: ExportTiming | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.file}: {format_bytes(self.file_bytes)}, opset {self.opset}, {self.precision}",
            f"  {'model':<10} {self.model}, {self.architecture} ×{self.scale},"
            f" {self.parameters:,} parameters",
        ]
        if not self.checked:
            return "\n".join([*lines, f"  {'checked':<10} no: {self.unchecked_reason}"])
        for index, one in enumerate(self.sizes):
            lines.append(f"  {'' if index else 'checked':<10} {_size_line(one)}")
        if self.timing is not None:
            lines.append(f"  {'CPU time':<10} {_timing_line(self.timing)}")
        lines += [f"  {'note':<10} {note}" for note in self.notes]
        return "\n".join(lines)


def _size_line(one: SizeCheckReport) -> str:
    level = "" if one.sigma is None else f" at a sigma of {one.sigma * 255:.0f} of 255"
    text = f"{one.width}×{one.height}{level}: differs by {one.difference:.1e} from PyTorch in fp32"
    decibels = "equal" if one.psnr_db is None else f"{one.psnr_db:.1f} dB"
    if one.bound is None:
        return f"{text}, {decibels} on a photograph"
    if one.pytorch_difference is None:
        return text
    return f"{text}, {decibels}; PyTorch at this precision by {one.pytorch_difference:.1e}"


def _timing_line(timing: ExportTiming) -> str:
    return (
        f"{timing.width}×{timing.height}: {timing.onnxruntime_seconds:.3f} s by ONNX Runtime,"
        f" {timing.torch_seconds:.3f} s by PyTorch"
    )
