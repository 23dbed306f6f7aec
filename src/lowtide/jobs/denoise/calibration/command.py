"""Calibrate the noise of a camera or a scanner: stage 1, which `lowtide train noise` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Unpack

import numpy as np
from pydantic import BaseModel

from lowtide.core.atomic_file import require_name, require_output, require_replaceable
from lowtide.core.errors import InputError, UsageError
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.denoise.calibration.frame_checks import require_noisy_pair
from lowtide.jobs.denoise.calibration.frames import (
    frames_by_iso,
    matching_pairs,
    read_unit_planes,
)
from lowtide.jobs.denoise.calibration.photon_transfer import calibrate_sensor
from lowtide.jobs.denoise.calibration.settings import CalibrationKeywords, CalibrationSettings
from lowtide.jobs.denoise.calibration.volumes import SCALE_NOTE, calibrate_volumes
from lowtide.jobs.engine.settings import show_keywords
from lowtide.models.denoiser.noise_statistics import ImageVarianceStatistics, PairVarianceStatistics
from lowtide.models.denoiser.noise_table import NoiseSetting, NoiseTable
from lowtide.models.denoiser.variance import VarianceLine, fit_line, fit_lower_line

_SUFFIX = ".json"
_LEAST_BINS = 3
_BEND = 0.1
_OFFSET = 0.02
_MOST_TEXTURE = 0.5
Source = Literal["flat and dark frames", "pairs", "images", "volumes"]
_MODELS: dict[Source, str] = {"flat and dark frames": "raw-camera", "volumes": "rician"}


class TrainNoiseReport(BaseModel):
    """Report of a calibration: the table that was written, from how many files, and warnings."""

    schema_version: int = SCHEMA_VERSION
    output: str
    measured_from: Source
    files: int
    table: NoiseTable
    warnings: list[str] = []

    def __str__(self) -> str:
        table = self.table
        lines = [
            f"wrote {self.output}: {table.noise_model} noise of {table.camera}, from {self.files}"
            f" {'file' if self.files == 1 else 'files'} ({self.measured_from})"
        ]
        for one in table.settings:
            if self.measured_from != "volumes":
                lines.append("without ISO" if one.iso is None else f"ISO {one.iso}")
            for name, value in one.parameters.items():
                error = one.standard_errors.get(name)
                shown = "normal" if value is None else f"{value:.6g}"
                lines.append(f"  {name:12} {shown}" + (f" ± {error:.2g}" if error else ""))
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


@show_keywords(CalibrationSettings, CalibrationKeywords)
def train_noise(
    output: str | Path,
    *,
    force: bool = False,
    **settings: Unpack[CalibrationKeywords],
) -> TrainNoiseReport:
    """Calibrate a noise model and write it as JSON, which `load_noise` reads.

    Args:
        output: File of the noise table, which ends in .json.
        force: Replace ``output``.
        settings: What to measure and what is known of it, as fields of `CalibrationSettings`.

    Raises:
        UsageError: Arguments contradict each other, or ``output`` exists.
        InputError: Files are missing, too few, of different sizes, or all saturated.
        OutputError: ``output`` cannot be written.
    """
    require_name(output)
    path = Path(output)
    require_replaceable(path)  # a folder has no suffix
    chosen = CalibrationSettings.of(**settings)
    if path.suffix.lower() != _SUFFIX:  # with ``force`` it might be one of the pictures
        raise UsageError(
            f"{path}: noise tables are {_SUFFIX} files", hint=f"-o {path.with_suffix(_SUFFIX)}"
        )
    require_output(path, force=force)
    if chosen.flat is not None and chosen.dark is not None:
        source: Source = "flat and dark frames"
        found, files = _from_frames(chosen.flat, chosen.dark, chosen.iso, chosen.white_level)
    elif chosen.pairs is not None:
        source = "pairs"
        found, files = _from_pairs(chosen.pairs, chosen.iso)
    elif chosen.volumes is not None:
        source = "volumes"
        found, files = [calibrate_volumes(chosen.volumes)], 1
    else:
        assert chosen.images is not None
        source = "images"
        found, files = _from_images(chosen.images, chosen.iso)
    found.sort(key=lambda one: one[0].iso or 0)
    name = chosen.camera or path.stem
    table = NoiseTable(
        camera=name if chosen.volumes is None else f"{name} ({SCALE_NOTE})",
        noise_model=_MODELS.get(source, "poisson-gaussian"),
        settings=tuple(setting for setting, _ in found),
    )
    table.check()
    table.save(path, replace=force)
    return TrainNoiseReport(
        output=str(path),
        measured_from=source,
        files=files,
        table=table,
        warnings=[text for _, warnings in found for text in warnings],
    )


_Curve = tuple[np.ndarray, np.ndarray, np.ndarray]  # means, variances, counts
_Found = tuple[list[tuple[NoiseSetting, list[str]]], int]


def _from_frames(flat: Path, dark: Path, iso: int | None, white: float | None) -> _Found:
    lit, unlit = frames_by_iso(flat, iso), frames_by_iso(dark, iso)
    for one, other, folder in ((lit, unlit, dark), (unlit, lit, flat)):
        for missing in one.keys() - other.keys():
            name = "without ISO" if missing is None else f"of ISO {missing}"
            raise InputError(
                f"{folder}: no frames {name}, as {one[missing][0]} is",
                hint="flat and dark frames are needed at each ISO",
            )
    found = [calibrate_sensor(key, lit[key], unlit[key], white) for key in lit]
    return found, sum(len(paths) for group in (lit, unlit) for paths in group.values())


def _from_pairs(folder: Path, iso: int | None) -> _Found:
    groups = matching_pairs(folder, iso)
    found = []
    for key, pairs in groups.items():
        statistics = PairVarianceStatistics()
        for noisy, clean in pairs:
            images = read_unit_planes(noisy), read_unit_planes(clean)
            if images[0].shape != images[1].shape:
                sizes = " and ".join(f"{one.shape[2]} × {one.shape[1]}" for one in images)
                raise InputError(f"{noisy} and {clean} differ in size or channels: {sizes}")
            require_noisy_pair(noisy, clean, images)
            statistics.add(*images)
        where = str(pairs[0][0])
        curve = _checked(key, where, statistics.curve(), statistics.clipped)
        setting, warnings = _poisson_gaussian(key, curve, fit_line(*curve), statistics.clipped)
        if statistics.offset > _OFFSET:
            warnings.append(
                f"noisy and clean images differ in brightness, by up to {statistics.offset:.0%}"
            )
        found.append((setting, warnings))
    return found, 2 * sum(map(len, groups.values()))


def _from_images(folder: Path, iso: int | None) -> _Found:
    groups = frames_by_iso(folder, iso)
    found = []
    for key, paths in groups.items():
        statistics = ImageVarianceStatistics()
        for path in paths:
            for plane in read_unit_planes(path):
                statistics.add(plane)
        curve = _checked(key, str(paths[0]), statistics.curve(), statistics.clipped)
        line, texture = fit_lower_line(*curve)
        setting, warnings = _poisson_gaussian(key, curve, line, statistics.clipped)
        if texture > _MOST_TEXTURE:
            warnings.append(
                f"{_shown(key)}texture: {texture:.0%} of the pixels are of a brightness with more"
                " than noise, and left out"
            )
        found.append((setting, warnings))
    return found, sum(map(len, groups.values()))


def _checked(iso: int | None, first: str, curve: _Curve, clipped: float) -> _Curve:
    if not curve[0].size:
        reason = "all saturated" if clipped > 0.5 else "too few pixels that are not clipped"
        raise InputError(
            f"{first}: {_shown(iso)}{reason}", hint="use more, larger or darker images"
        )
    return curve


def _shown(iso: int | None) -> str:
    return "" if iso is None else f"ISO {iso}: "


def _poisson_gaussian(
    iso: int | None, curve: _Curve, line: VarianceLine, clipped: float
) -> tuple[NoiseSetting, list[str]]:
    """Return the parameters of a line of variance over mean, and warnings."""
    means, where = curve[0], _shown(iso)
    b = float(np.sqrt(line.offset))
    errors = {
        "a": line.slope_error,
        "b": line.offset_error / (2 * b) if b else float(np.sqrt(line.offset_error)),
    }
    warnings = []
    if clipped > 0.01:
        warnings.append(f"{where}clipped: {clipped:.1%} of the pixels are at 0 or 1")
    if len(means) < _LEAST_BINS or means.max() < 2 * means.min():
        warnings.append(
            f"{where}too few levels to tell shot noise from the rest: brightness is from"
            f" {means.min():.3g} to {means.max():.3g}"
        )
    if abs(line.bend) > _BEND:
        warnings.append(
            f"{where}not linear: at the brightest level the variance is off its line by"
            f" {abs(line.bend):.0%}"
        )
    setting = NoiseSetting(iso=iso, parameters={"a": line.slope, "b": b}, standard_errors=errors)
    return setting, warnings
