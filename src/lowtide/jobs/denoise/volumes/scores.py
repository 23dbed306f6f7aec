"""Scores of a denoised series without a clean one: residual structure, SNR and CNR in masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import BaseModel

from lowtide.core.errors import InputError
from lowtide.media.volume_file import VolumeSource
from lowtide.media.volume_header import VolumeFacts, inspect_volume

SIGNAL, BACKGROUND = 1, 2  # labels that scores are of


class VolumeMask:
    """Labels of the voxels of each volume of a file; those without a label above 0 are copied.

    ``signal`` and ``background`` count the voxels of these labels, and ``outside`` those without.

    Raises:
        InputError: The file is not of the volumes' shape, or has no label above 0.
    """

    def __init__(self, path: Path, volume: VolumeFacts) -> None:
        self._facts = inspect_volume(path)
        expected = (*volume.shape[:3], 1)
        if self._facts.shape != expected:
            raise InputError(
                f"{path}: a mask of {_shown(self._facts.shape)}, and {volume.path} is"
                f" {_shown(volume.shape)}",
                hint="one label for each voxel of a volume: 0 where it is to be copied",
            )
        self._source, self._next = VolumeSource(self._facts), 0
        self.signal = self.background = self.outside = 0
        for place in range(self._facts.slices):
            labels = self.labels(place)
            self.signal += int((labels == SIGNAL).sum())
            self.background += int((labels == BACKGROUND).sum())
            self.outside += labels.size - int((labels > 0).sum())
        self.close()
        if self.outside == np.prod(expected):
            raise InputError(
                f"{path}: no voxel has a label above 0, so that all would be copied",
                hint="labels are 1 for signal and 2 for background, or 1 for all of a head",
            )

    def labels(self, place: int) -> np.ndarray:
        """Return the labels of slice ``place`` of each volume, (H, W)."""
        if place < self._next:
            self.close()
        self._next = place + 1
        return self._facts.to_units(self._source.read(place, place + 1))[0, ..., 0]

    def close(self) -> None:
        """Close the file, which `labels` opens again."""
        self._source.close()
        self._source, self._next = VolumeSource(self._facts), 0


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


class ResidualStructure(BaseModel):
    """What a residual, noisy minus denoised, has that white noise has not; 0 is none.

    Correlations over the foreground, each the mean over volumes: of the residual with the denoised
    image, which structure that was removed raises, and of neighboring voxels of the residual within
    a slice. ``std`` is its standard deviation in data units.
    """

    image_correlation: float
    neighbor_correlation: float
    std: float


class MaskScores(BaseModel):
    """SNR and CNR by the labels of a mask, 1 for signal and 2 for background: means over volumes.

    SNR is the mean of the signal over the standard deviation of the background, CNR the difference
    of the means over the same; None where the background has no deviation.
    """

    snr_before: float | None
    snr_after: float | None
    cnr_before: float | None
    cnr_after: float | None
    signal_voxels: int
    background_voxels: int


class SeriesScorer:
    """Both scores of a series, slice by slice; that of masks where one has both labels."""

    def __init__(self, mask: VolumeMask | None) -> None:
        self.structure = ResidualCorrelations()
        self._mask = None
        if mask is not None and mask.signal and mask.background:
            self._mask = SnrCnrStatistics(mask)

    def add(
        self, labels: np.ndarray, before: np.ndarray, after: np.ndarray, threshold: float
    ) -> None:
        """Add a slice (H, W) by its labels, in data units; foreground is above a value."""
        self.structure.add(before, after, np.isfinite(before) & (before > threshold) & (labels > 0))
        if self._mask is not None:
            self._mask.add(labels, before, after)

    def end_volume(self) -> None:
        """Close a volume."""
        self.structure.end_volume()
        if self._mask is not None:
            self._mask.end_volume()

    def of_mask(self) -> MaskScores | None:
        """Return SNR and CNR, None without a mask."""
        return None if self._mask is None else self._mask.result()


class ResidualCorrelations:
    """Running sums over the volumes of a series; `end_volume` closes each."""

    def __init__(self) -> None:
        self._pairs, self._neighbors = np.zeros(6), np.zeros(6)
        self._found: list[tuple[float, float, float]] = []

    def add(self, before: np.ndarray, after: np.ndarray, foreground: np.ndarray) -> None:
        """Add a slice (H, W) before and after, in data units, and where it is foreground."""
        residual = np.where(foreground, before, 0).astype(np.float64) - np.where(
            foreground, after, 0
        )
        self._pairs += _sums(residual[foreground], after[foreground].astype(np.float64))
        for one, other in (
            (np.s_[:, :-1], np.s_[:, 1:]),
            (np.s_[:-1], np.s_[1:]),
        ):
            both = foreground[one] & foreground[other]
            self._neighbors += _sums(residual[one][both], residual[other][both])

    def end_volume(self) -> None:
        """Close a volume."""
        deviation = _deviation(self._pairs)
        if deviation > 0:
            correlations = _correlation(self._pairs), _correlation(self._neighbors)
            self._found.append((*correlations, deviation))
        self._pairs, self._neighbors = np.zeros(6), np.zeros(6)

    def result(self) -> ResidualStructure | None:
        """Return the means over volumes, None where nothing was removed from any."""
        if not self._found:
            return None
        image, neighbor, std = (round(float(one), 4) for one in np.mean(self._found, 0))
        return ResidualStructure(image_correlation=image, neighbor_correlation=neighbor, std=std)


class SnrCnrStatistics:
    """Running SNR and CNR of a series by the labels of a mask; `end_volume` closes each volume."""

    def __init__(self, mask: VolumeMask) -> None:
        self._mask = mask
        self._sums = np.zeros((2, 2, 3))  # before and after, label, powers
        self._found: list[list[tuple[float, float] | None]] = []

    def add(self, labels: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Add a slice (H, W) by its labels, before and after, in data units."""
        for sums, image in zip(self._sums, (before, after), strict=True):
            for one, label in zip(sums, (SIGNAL, BACKGROUND), strict=True):
                values = image[(labels == label) & np.isfinite(image)].astype(np.float64)
                one += values.size, values.sum(), (values**2).sum()

    def end_volume(self) -> None:
        """Close a volume."""
        self._found.append([_ratios(*sums) for sums in self._sums])
        self._sums[:] = 0

    def result(self) -> MaskScores:
        """Return the means over volumes."""
        means: list[list[float | None]] = []
        for column in zip(*self._found, strict=True):
            known = [one for one in column if one is not None]
            if not known:
                means.append([None, None])
            else:
                means.append([round(float(one), 3) for one in np.mean(known, 0)])
        (snr, cnr), (snr_after, cnr_after) = means
        return MaskScores(
            snr_before=snr,
            snr_after=snr_after,
            cnr_before=cnr,
            cnr_after=cnr_after,
            signal_voxels=self._mask.signal,
            background_voxels=self._mask.background,
        )


def _sums(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return count, sums, sums of squares and sum of products."""
    return np.array(
        [one.size, one.sum(), other.sum(), (one**2).sum(), (other**2).sum(), (one * other).sum()]
    )


def _deviation(sums: np.ndarray) -> float:
    if sums[0] < 2:
        return 0.0
    return float(np.sqrt(max(sums[3] / sums[0] - (sums[1] / sums[0]) ** 2, 0)))


def _correlation(sums: np.ndarray) -> float:
    if sums[0] < 2:
        return 0.0
    count, first, second, first_squares, second_squares, products = sums
    covariance = products / count - first * second / count**2
    spread = (first_squares / count - (first / count) ** 2) * (
        second_squares / count - (second / count) ** 2
    )
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def _ratios(signal: np.ndarray, background: np.ndarray) -> tuple[float, float] | None:
    """Return SNR and CNR from counts, sums and sums of squares; None without a deviation."""
    if not signal[0] or background[0] < 2:
        return None
    means = signal[1] / signal[0], background[1] / background[0]
    deviation = np.sqrt(max(background[2] / background[0] - means[1] ** 2, 0))
    if deviation <= 1e-9 * max(abs(means[0]), abs(means[1])):
        return None
    return float(means[0] / deviation), float((means[0] - means[1]) / deviation)
