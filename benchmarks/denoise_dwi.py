"""Denoise a diffusion series whose truth is known: what volumes share, and what a network adds.

A phantom of three tissues, gray matter, white matter in rings and fluid: 64 × 64 × 8 voxels, 2
volumes without diffusion weighting and 18 with b = 1000, Rician noise of 40, and the same with
fewer volumes. It favors MP-PCA: nothing moves, and each voxel is one tensor. Errors are in the
foreground, those of FA of tensors that dipy fits. Run:

    python benchmarks/denoise_dwi.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
from common import ResultFile
from dipy.core.gradients import gradient_table
from dipy.denoise.localpca import mppca
from dipy.reconst.dti import TensorModel
from scipy.ndimage import gaussian_filter

import lowtide

SHAPE, SIGMA, SEED = (64, 64, 8), 40, 2
VOLUMES = (20, 12, 8)
NETWORK = "lowtide-denoise"
# Levels of a second stage, in data units; nothing in a file tells the best.
SECOND = (3, 6, 10, 15)


@dataclass(frozen=True)
class Phantom:
    """Values of a clean and a noisy series (X, Y, Z, V), with its b-values and directions."""

    clean: np.ndarray
    noisy: np.ndarray
    values: np.ndarray
    directions: np.ndarray

    @classmethod
    def of(cls, volumes: int) -> Phantom:
        """Make one of so many volumes, the first two of which are not weighted."""
        random = np.random.default_rng(SEED)
        x, y, z = np.meshgrid(*(np.linspace(-1, 1, one) for one in SHAPE), indexing="ij")
        radius, angle = np.hypot(x / 0.85, y / 0.92), np.arctan2(y, x)
        head, fluid = radius < 1, np.hypot(x / 0.15, (y - 0.1) / 0.35) < 1
        fold = radius + 0.05 * np.sin(9 * angle + 4 * z)
        signal = np.where(head, np.where(fold > 0.8, 950.0, 700.0), 0.0)
        signal[fluid] = 1500
        signal = gaussian_filter(signal, (0.5, 0.5, 0))
        directions = random.standard_normal((volumes, 3))
        directions /= np.linalg.norm(directions, axis=1)[:, None]
        directions[:2] = 0
        values = np.array([0, 0] + [1000] * (volumes - 2))
        white = (fold < 0.72) & ~fluid & head
        axis = np.stack([-np.sin(angle), np.cos(angle), np.full(SHAPE, 0.3)], -1)
        axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
        along = (axis @ directions.T) ** 2
        other = np.where(fluid, 3e-3, 0.8e-3)[..., None]
        decay = np.where(white[..., None], 0.3e-3 + 1.4e-3 * along, other)
        clean = signal[..., None] * np.exp(-values * decay)
        real, imaginary = (SIGMA * random.standard_normal(clean.shape) for _ in range(2))
        return cls(clean, np.rint(np.hypot(clean + real, imaginary)), values, directions)

    @property
    def head(self) -> np.ndarray:
        """Where there is signal."""
        return self.clean[..., 0] > 100

    def figures(self, made: np.ndarray) -> dict[str, float]:
        """Errors of a result in the foreground, and the mean of the background, which is 0."""
        error, background = (made - self.clean)[self.head], self.clean == 0
        fa, right = self._anisotropy(made), self._anisotropy(self.clean)
        return {
            "b0_rmse": root_mean_square(error[:, :2]),
            "dwi_rmse": root_mean_square(error[:, 2:]),
            "fa_bias": float((fa - right).mean()),
            "fa_rmse": root_mean_square(fa - right),
            "background": float(made[background].mean()),
        }

    def _anisotropy(self, made: np.ndarray) -> np.ndarray:
        table = gradient_table(self.values, bvecs=self.directions)
        fit = TensorModel(table).fit(np.maximum(made, 1e-3), mask=self.head)
        return fit.fa[self.head]


def root_mean_square(values: np.ndarray) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(values**2)))


def denoised(values: np.ndarray, **options: object) -> np.ndarray:
    """Denoise a series by `lowtide.denoise`."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.nii", Path(folder) / "out.nii"
        nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.eye(4)), source)
        lowtide.denoise(source, target, budget="1GiB", **options)
        return nibabel.load(target).get_fdata()


def methods(volumes: int) -> Iterator[tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """Each method by its name; those that only explain are run on the whole series."""
    yield "noisy", lambda noisy: noisy
    yield "slice by slice", lambda noisy: denoised(noisy, model=NETWORK)
    yield "default", lambda noisy: denoised(noisy)
    yield "rician", lambda noisy: denoised(noisy, noise="rician")
    if volumes != VOLUMES[0]:
        return
    yield "level given", lambda noisy: denoised(noisy, sigma=SIGMA)
    yield "dipy mppca, one call", lambda noisy: mppca(noisy.astype(np.float32), patch_radius=2)
    for level in SECOND:
        yield (
            f"default, then slices at {level}",
            lambda noisy, level=level: denoised(denoised(noisy), model=NETWORK, sigma=level),
        )


def main() -> None:
    """Measure each row that is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="measure all rows again")
    parser.add_argument("--folder", type=Path, help="of the result file")
    given = parser.parse_args()
    results = ResultFile(
        "denoise_dwi",
        about="A diffusion series whose truth is known",
        fresh=given.fresh,
        packages=("nibabel", "dipy"),
        folder=given.folder,
    )
    denoised(Phantom.of(3).noisy[:16, :16])  # loads what is loaded once
    for volumes in VOLUMES:
        phantom = Phantom.of(volumes)
        for name, method in methods(volumes):
            row = f"{volumes} volumes, {name}"
            if not results.has(row):
                started = time.process_time()
                made = method(phantom.noisy)
                cpu_s = time.process_time() - started
                results.add(row, **phantom.figures(made), cpu_s=cpu_s)


if __name__ == "__main__":
    main()
