"""Noise of a series by what its volumes share: MP-PCA.

The voxels of a patch by the volumes are a matrix of a few principal components, which all volumes
share, and of noise, whose eigenvalues are known from random matrix theory (Veraart et al.,
Denoising of diffusion MRI using random matrix theory, NeuroImage 2016). dipy computes it, on blocks
of rows: a value depends on the patches that it is in, and these on twice the radius around it, so
that those of blocks with as much around them are those of one call, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np

from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.jobs.denoise.states import ScratchImage
from lowtide.jobs.denoise.volumes.scores import VolumeMask
from lowtide.jobs.denoise.volumes.survey import VolumeSurvey
from lowtide.media.volume_file import VolumeSource
from lowtide.models.denoiser.variance import RicianStabilizer

# Of two volumes, what each has and the other has not looks like their noise.
_LEAST_VOLUMES = 3
_RADIUS = 2
# Copies of a block in float32: its values, two sums, their quotient, and a copy of that.
_COPIES = 5


def has_dipy() -> bool:
    """Return whether dipy is installed."""
    return find_spec("dipy") is not None


def load_dipy() -> Any:
    """Import what is used of dipy, which takes a second, and return its function."""
    from dipy.denoise.localpca import genpca

    return genpca


@dataclass(frozen=True)
class SeriesPatches:
    """Patches of a series of ``shape`` (X, Y, Z, V): ``radius`` voxels around one, by axis."""

    shape: tuple[int, int, int, int]
    radius: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, int, int, int]) -> Self | None:
        """Return patches of more voxels than volumes; None for fewer than 3 volumes, or voxels."""
        *sizes, volumes = shape
        for radius in range(_RADIUS, max(sizes) // 2 + 1) if volumes >= _LEAST_VOLUMES else ():
            patches = cls(shape, tuple(min(radius, (size - 1) // 2) for size in sizes))
            if np.prod(patches.sizes) > volumes:
                return patches
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Voxels along each axis."""
        return tuple(2 * one + 1 for one in self.radius)

    @property
    def description(self) -> str:
        """What is done, in words."""
        sizes = " × ".join(map(str, self.sizes))
        return f"MP-PCA of {self.shape[3]} volumes in patches of {sizes}, without the network"

    def bytes_of(self, rows: int) -> int:
        """Return the memory of a block that ``rows`` rows of values are made of."""
        x, y, z, volumes = self.shape
        return min(y, rows + 4 * self.radius[1]) * x * z * volumes * 4 * _COPIES

    def rows_within(self, limit_bytes: int) -> int:
        """Return how many rows a block may make within a limit, and 1 where none can."""
        rows = self.shape[1]
        while rows > 1 and self.bytes_of(rows) > limit_bytes:
            rows = (rows + 1) // 2
        return rows

    def blocks(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """Iterate over blocks: first and last row that they make, and that they are made of."""
        height, around = self.shape[1], 2 * self.radius[1]
        for first in range(0, height, rows):
            last = min(first + rows, height)
            yield first, last, max(0, first - around), min(height, last + around)

    def lines(self, rows: int) -> int:
        """Return the lines of patches of all blocks."""
        _, along_y, along_z = self.radius
        deep = self.shape[2] - 2 * along_z
        return sum(end - begin - 2 * along_y for *_, begin, end in self.blocks(rows)) * deep


class DenoisedSeriesSlices:
    """Slices of a denoised series, which are computed at once and kept in a scratch file.

    Args:
        rows: Rows that a block makes.
        on_steps: Called with 1 for each line of patches.
    """

    def __init__(
        self,
        survey: VolumeSurvey,
        patches: SeriesPatches,
        rows: int,
        mask: VolumeMask | None,
        *,
        scratch: Path | None = None,
        cancel: Cancel = None,
        on_steps: Callable[[int], None] | None = None,
    ) -> None:
        self._survey, self._facts, self._mask = survey, survey.facts, mask
        self._patches, self._cancel, self._on_steps = patches, cancel, on_steps
        level = survey.median_level
        assert level is not None
        self._transform = RicianStabilizer(level) if survey.rician else None
        # A level that was not estimated holds everywhere; else each patch tells its own.
        self._sigma = None if survey.source == "estimated" else 1.0 if survey.rician else level
        # dipy cuts values off at 0, which is right for magnitudes.
        lows = [one.low - one.span for one in survey.ranges if one.low < 0]
        self._low = 0.0 if survey.rician else min(lows, default=0.0)
        x, y, *_ = self._facts.shape
        self._made = ScratchImage((self._facts.slices * y, x, 1), scratch)
        try:
            for block in patches.blocks(rows):
                self._make(*block)
        except BaseException:  # a stop, too
            self.close()
            raise

    def slice(self, place: int, before: np.ndarray) -> np.ndarray:
        """Return slice ``place`` of the file, (H, W, 1) in data units, of which this is made."""
        volume, height = place // self._facts.shape[2], self._facts.shape[1]
        scale = self._survey.scales[volume]
        if scale is None or not scale.has_noise:
            return before
        made = self._made.read(place * height, (place + 1) * height)
        if self._transform is not None:
            made = self._transform.inverse(made)
        return scale.finished(before, made)

    def close(self) -> None:
        """Release the scratch file."""
        self._made.close()

    def _make(self, first: int, last: int, begin: int, end: int) -> None:
        """Write the rows from ``first`` to before ``last``, made of those of a block."""
        values = self._read(begin, end)
        inside = self._inside(begin, end) & values.any(-1)
        values -= self._low
        watched = inside.view(_Watched)
        watched.first, watched.on_line = self._patches.radius[0], self._on_line
        # Voxels that no patch covers are 0/0.
        with np.errstate(invalid="ignore"):
            found = load_dipy()(
                values,
                sigma=self._sigma,
                mask=watched,
                patch_radius=self._patches.radius,
                suppress_warning=True,
            )
        values = found + np.float32(self._low) if self._low else found
        values[~inside] = np.nan
        _, height, slices, volumes = self._facts.shape
        for volume in range(volumes):
            for place in range(slices):
                image = values[:, first - begin : last - begin, place, volume].T
                row = (volume * slices + place) * height + first
                self._made.write(row, image[..., None])

    def _read(self, begin: int, end: int) -> np.ndarray:
        """Return rows of all volumes, (X, N, Z, V); what is not finite is its slice's mean."""
        facts, (x, _, slices, volumes) = self._facts, self._facts.shape
        values = np.empty((x, end - begin, slices, volumes), np.float32)
        with VolumeSource(facts) as source:
            for place in range(facts.slices):
                raise_if_cancelled(self._cancel)
                volume, number = divmod(place, slices)
                image = facts.to_units(source.read(place, place + 1))[0, ..., 0]
                image = self._survey.ranges[volume].known(image)
                finite = np.isfinite(image)
                mean = image[finite].mean(dtype=np.float64) if finite.any() else 0.0
                rows = np.where(finite, image, mean)[begin:end]
                if self._transform is not None:
                    rows = self._transform.forward(rows)
                values[:, :, number, volume] = rows.T
        return values

    def _inside(self, begin: int, end: int) -> np.ndarray:
        """Return where the mask has a label, in rows of all slices, (X, N, Z)."""
        x, _, slices, _ = self._facts.shape
        inside = np.ones((x, end - begin, slices), bool)
        for place in range(slices if self._mask is not None else 0):
            assert self._mask is not None
            inside[:, :, place] = (self._mask.labels(place)[begin:end] > 0).T
        return inside

    def _on_line(self) -> None:
        raise_if_cancelled(self._cancel)
        if self._on_steps is not None:
            self._on_steps(1)


class _Watched(np.ndarray):
    """Mask that calls ``on_line`` where a line of patches begins.

    dipy asks it for each patch, over minutes in which nothing else shows progress or stops it.
    """

    first: int
    on_line: Callable[[], None]

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, tuple) and place[0] == self.first:
            self.on_line()
        return super().__getitem__(place)
