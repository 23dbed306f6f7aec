"""Settings of an export, validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from lowtide.core.errors import UsageError
from lowtide.core.option import Option
from lowtide.jobs.engine.settings import JobSettings

FilePrecision = Literal["fp32", "fp16", "bf16", "int8"]


class ExportKeywords(TypedDict, total=False):
    """Keywords of `export_onnx`: the fields of `ExportSettings`."""

    precision: FilePrecision
    calibrate: Sequence[str | Path]
    opset: int
    unchecked: bool


@dataclass(frozen=True, kw_only=True)
class ExportSettings(JobSettings):
    """Settings of an export, except its files.

    Attributes:
        precision: Precision of weights and layers; images and results are fp32. int8 is smaller and
            faster, but not equal.
        calibrate: For int8: a photograph or a folder of them, like those to be upscaled. Half of
            them calibrate the file, the others measure its error. May be given several times.
        opset: 23 has an attention operator, 20 decomposes it for older runtimes.
        unchecked: Keep a file that cannot be run here too.
    """

    precision: FilePrecision = "fp32"
    calibrate: Annotated[tuple[Path, ...], Option(metavar="PATH", repeats=True)] = ()
    opset: Annotated[int, Option(metavar="N")] = 23
    unchecked: bool = False

    def check(self) -> None:
        """Raise `UsageError` for int8 without photographs, or another precision with some."""
        if self.precision == "int8" and not self.calibrate:
            raise UsageError(
                "int8 is calibrated on photographs, and none is given",
                hint="--calibrate FOLDER, with a few photographs like those you upscale",
            )
        if self.calibrate and self.precision != "int8":
            raise UsageError(
                f"{self.precision} is not calibrated: --calibrate is for --precision int8 only"
            )
