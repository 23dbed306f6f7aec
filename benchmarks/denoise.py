"""The bundled denoiser on photographs with Gaussian noise, next to non-local means and TV.

    python benchmarks/denoise.py [--t1 FILE.npy] [--only "camera, sigma 25"] [--fresh]

A row is one picture at one noise level: the mean of three noise seeds, through `lowtide.denoise`
from file to file: with the level given, estimated, and estimated with two steps. The picture is
scikit-image's `camera`, and with ``--t1`` (or the environment variable LOWTIDE_T1) dipy's
`t1_coronal_slice`, which is not part of the project. Noise is unclipped in float32 TIFF files, or
clipped and rounded to 8 bits in PNG files. Rows of other weights than the bundled ones are measured
again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyvips
from common import ResultFile, row_parser

import lowtide
from lowtide.core.metrics import psnr, ssim
from lowtide.core.philox import philox_generator

ABOUT = (
    "Gaussian noise on a photograph and an MRI slice, neither of which the model was trained on:"
    " mean of three noise seeds"
)
UNCLIPPED, CLIPPED = (10, 15, 25, 50), (15, 25)
SEEDS = (0, 1, 2)
# Patch size, distance, and h as a share of sigma; and weights of TV, as such shares.
MEANS = ((5, 6, 0.8), (7, 11, 0.6), (7, 11, 0.8))
WEIGHTS = (0.8, 1.0, 1.2)


def pictures(t1: Path | None) -> dict[str, np.ndarray]:
    """Clean images (H, W) in 0..1."""
    import skimage.data

    found = {"camera": skimage.data.camera() / 255}
    if t1 is not None:
        found["t1"] = np.load(t1).astype(np.float64)
    return found


def save_noisy(folder: Path, clean: np.ndarray, sigma: int, seed: int, clipped: bool) -> Path:
    """A noisy file: float32 TIFF, or 8-bit PNG if it is clipped."""
    noise = philox_generator(seed, 2, sigma, 0).standard_normal(clean.shape) * sigma / 255
    path = folder / ("noisy.png" if clipped else "noisy.tif")
    samples = np.float32(clean + noise)
    if clipped:
        samples = np.rint(samples.clip(0, 1) * 255).astype(np.uint8)
    pyvips.Image.new_from_array(samples).write_to_file(str(path))
    return path


def as_unit(path: Path) -> np.ndarray:
    """A gray file as (H, W) in 0..1, as it is now: libvips keeps files by their names."""
    samples = pyvips.Image.new_from_file(str(path), revalidate=True).numpy()
    return samples / (255 if samples.dtype == np.uint8 else 1)


def by_lowtide(noisy: Path, clean: np.ndarray, sigma: int | None, steps: int) -> dict[str, float]:
    """PSNR, SSIM, level and processor seconds of a run from file to file."""
    # Of the same type, since rounding to 8 bits would be part of the score.
    target = noisy.with_name("denoised" + noisy.suffix)
    (image,) = lowtide.denoise(noisy, target, sigma=sigma, steps=steps, force=True).images
    made = as_unit(target)
    return {
        "db": psnr(made, clean),
        "ssim": ssim(made, clean),
        "sigma": image.sigma,
        "cpu_s": image.cpu_seconds,
    }


def best(clean: np.ndarray, ways: Iterable[Callable[[], np.ndarray]]) -> tuple[float, float, float]:
    """Best PSNR of several ways, clipped to 0..1 and as it comes, and the seconds of the last."""
    scores, seconds = [], 0.0
    for way in ways:
        started = time.process_time()
        made = way()
        seconds = time.process_time() - started
        scores.append((psnr(made.clip(0, 1), clean), psnr(made, clean)))
    return max(one for one, _ in scores), max(one for _, one in scores), seconds


def by_others(noisy: np.ndarray, clean: np.ndarray, sigma: float) -> dict[str, float]:
    """Non-local means and total variation of scikit-image, the level known to both."""
    from skimage.restoration import denoise_nl_means, denoise_tv_chambolle

    def means() -> Iterator[Callable[[], np.ndarray]]:
        for size, distance, share in MEANS:
            yield lambda size=size, distance=distance, share=share: denoise_nl_means(
                noisy, patch_size=size, patch_distance=distance, h=share * sigma, sigma=sigma
            )

    variations = (
        lambda share=share: denoise_tv_chambolle(noisy, weight=share * sigma) for share in WEIGHTS
    )
    nlm_db, nlm_unclipped_db, nlm_s = best(clean, means())
    tv_db, _, tv_s = best(clean, variations)
    return {
        "nlm_db": nlm_db,
        "nlm_unclipped_db": nlm_unclipped_db,
        "nlm_cpu_s": nlm_s,
        "tv_db": tv_db,
        "tv_cpu_s": tv_s,
    }


def measure(clean: np.ndarray, sigma: int, clipped: bool) -> dict[str, float]:
    """The mean figures of all seeds."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            path = save_noisy(Path(folder), clean, sigma, seed, clipped)
            noisy = as_unit(path)
            run = {"noisy_db": psnr(noisy, clean)}
            for name, level, steps in (
                ("given", sigma, 1),
                ("estimated", None, 1),
                ("two_steps", None, 2),
            ):
                found = by_lowtide(path, clean, level, steps)
                run |= {f"{name}_{figure}": value for figure, value in found.items()}
            runs.append(run | by_others(noisy, clean, sigma / 255))
    return {name: round(float(np.mean([run[name] for run in runs])), 4) for name in runs[0]}


def main() -> None:
    """Measure the rows that are missing."""
    parser = row_parser(__doc__)
    parser.add_argument("--t1", type=Path, default=os.environ.get("LOWTIDE_T1"))
    options = parser.parse_args()
    model = lowtide.load("lowtide-denoise").descriptor.sha256
    results = ResultFile(
        "denoise", about=ABOUT, fresh=options.fresh, packages=("scikit-image", "scipy")
    )
    kinds = [(sigma, False) for sigma in UNCLIPPED] + [(sigma, True) for sigma in CLIPPED]
    for picture, clean in pictures(options.t1).items():
        for sigma, clipped in kinds:
            row = f"{picture}, sigma {sigma}{', 8 bits' if clipped else ''}"
            if options.only not in row:
                continue
            if results.has(row):
                if results.row(row)["model_sha256"] == model:
                    continue
                results.drop([row])
            facts = {"picture": picture, "sigma": sigma, "clipped": clipped, "model_sha256": model}
            results.add(row, **facts, **measure(clean, sigma, clipped))


if __name__ == "__main__":
    main()
