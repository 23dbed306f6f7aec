"""Settings of a calibration of noise, validated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

from annotated_types import Gt, Lt

from lowtide.core.errors import UsageError
from lowtide.core.option import Option
from lowtide.jobs.engine.settings import JobSettings

_FROM = "Files to measure"
_FOLDER = Option(_FROM, metavar="DIR")
_HINT = (
    "lowtide train noise --flat DIR --dark DIR, or --pairs DIR, or --images DIR, or --volumes FILE"
)


class CalibrationKeywords(TypedDict, total=False):
    """Keywords of `train_noise`: the fields of `CalibrationSettings`."""

    flat: str | Path | None
    dark: str | Path | None
    pairs: str | Path | None
    images: str | Path | None
    volumes: str | Path | None
    iso: int | None
    white_level: float | None
    camera: str | None


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings(JobSettings):
    """Settings of a calibration: one kind of files, and what they do not say.

    Flat and dark frames give `RawCameraNoise`, volumes `RicianNoise`, whose 1 is the 99.9th
    percentile of the brightest one, and everything else `PoissonGaussianNoise`.

    Attributes:
        flat: Evenly lit frames, two or more of each exposure. Needs --dark.
        dark: Frames without light, two or more.
        pairs: DIR/noisy and DIR/clean: images of the same names, aligned and equally bright.
        images: Single noisy images, of their flat parts.
        volumes: NIfTI file of two or more volumes of MRI, each measured against its neighbors.
        iso: ISO of all files. By default names of files or folders tell it: iso800.
        white_level: Level at which the sensor saturates; by default the largest of the file's type.
        camera: Name of the camera or scanner, by default the file's.
    """

    flat: Annotated[Path | None, _FOLDER] = None
    dark: Annotated[Path | None, _FOLDER] = None
    pairs: Annotated[Path | None, _FOLDER] = None
    images: Annotated[Path | None, _FOLDER] = None
    volumes: Annotated[Path | None, Option(_FROM, metavar="FILE")] = None
    iso: Annotated[
        Annotated[int, Gt(0), Lt(10_000_000)] | None, Option(_FROM, metavar="N", example=800)
    ] = None
    white_level: Annotated[Annotated[float, Gt(0)] | None, Option(_FROM, metavar="N")] = None
    camera: Annotated[str | None, Option("Output", metavar="NAME")] = None

    def check(self) -> None:
        """Raise `UsageError` unless one kind of files is given, with what is of that kind."""
        if (self.flat is None) != (self.dark is None):
            missing = "--flat" if self.flat is None else "--dark"
            raise UsageError(f"{missing} is missing: flat and dark frames go together", hint=_HINT)
        kinds = self.flat, self.pairs, self.images, self.volumes
        if (given := sum(one is not None for one in kinds)) != 1:
            problem = "two kinds of files are given" if given else "nothing to measure is given"
            raise UsageError(problem, hint=_HINT)
        if self.white_level is not None and self.flat is None:
            raise UsageError(f"--white-level {self.white_level:g} is only for --flat and --dark")
        if self.volumes is not None and self.iso is not None:
            raise UsageError(
                f"--iso {self.iso} is for cameras, and --volumes of a scanner", hint="drop it"
            )
