"""Steps and schedulers of the denoiser: PSNR, time and repeatability.

    python benchmarks/denoise_steps.py [--only TEXT] [--fresh]

The bundled model on scikit-image's camera, which it was not trained on, with Gaussian noise of a
sigma of 25 of 255, unclipped and known. PSNR and processor seconds are means over three images of
noise. Repeatability: whether two runs agree in every bit, and how much results of three seeds of
the sampler differ for one noisy image, as the standard deviation of a pixel in levels of 255.
fp32 on the CPU, with as many threads as OMP_NUM_THREADS says.
"""

from __future__ import annotations

import time
from statistics import mean

import numpy as np
import torch
from common import ResultFile, row_parser
from skimage import data

import lowtide
from lowtide.core.metrics import psnr
from lowtide.models.denoiser.config import SchedulerName
from lowtide.models.denoiser.denoiser import Denoiser
from lowtide.models.denoiser.sampling import sampling_steps

SIGMA, SEEDS = 25, 3
COUNTS = (2, 4, 10, 20, 50)
ROWS: list[tuple[SchedulerName, int]] = [
    ("ddim", 1),  # as every scheduler's
    *(("ddim", count) for count in COUNTS),
    *(("ddpm", count) for count in COUNTS),
    *((name, count) for name in ("dpmsolver++", "unipc", "flow") for count in (4, 10)),
]


def sample(
    denoiser: Denoiser, noisy: np.ndarray, scheduler: SchedulerName, count: int, seed: int
) -> np.ndarray:
    """The clean image (H, W, 3) of a noisy one."""
    state, predictions = noisy, []
    for step in sampling_steps(scheduler, SIGMA / 255, count):
        denoiser.set_level(step.sigma)
        with torch.inference_mode():
            made = denoiser(torch.from_numpy(state).permute(2, 0, 1)[None])
        clean = np.ascontiguousarray(made[0].permute(1, 2, 0).numpy())
        earlier = predictions[: len(step.earlier)]
        state = step.advance(state, clean, earlier, seed=seed, first=0)
        predictions = [clean, *earlier]
    return state.mean(2).clip(0, 1)


def measure(denoiser: Denoiser, scheduler: SchedulerName, count: int) -> dict[str, object]:
    """One row."""
    clean = np.float32(data.camera() / 255)
    images = [
        clean + np.float32(SIGMA / 255) * np.random.default_rng(seed).standard_normal(clean.shape)
        for seed in range(SEEDS)
    ]
    noisy = [np.float32(one)[..., None].repeat(3, 2) for one in images]
    found, seconds = [], []
    for one in noisy:
        started = time.process_time()
        found.append(sample(denoiser, one, scheduler, count, 0))
        seconds.append(time.process_time() - started)
    again = sample(denoiser, noisy[0], scheduler, count, 0)
    draws = [found[0]]
    if scheduler == "ddpm":
        draws += [sample(denoiser, noisy[0], scheduler, count, seed) for seed in range(1, SEEDS)]
    return {
        "scheduler": scheduler,
        "steps": count,
        "psnr_db": round(mean(psnr(one, clean) for one in found), 3),
        "cpu_s": round(mean(seconds), 2),
        "equal_bits": bool(np.array_equal(again, found[0])),
        "seed_deviation": round(255 * float(np.sqrt(np.var(draws, axis=0).mean())), 3),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measure what is missing."""
    options = row_parser(__doc__).parse_args()
    model = lowtide.load("lowtide-denoise")
    assert isinstance(model.module, Denoiser)
    results = ResultFile(
        "denoise_steps",
        fresh=options.fresh,
        packages=["scikit-image"],
        about=(
            f"The bundled denoiser on `camera` with noise of {SIGMA} of 255, unclipped and known,"
            " by scheduler and number of steps."
        ),
    )
    for scheduler, count in ROWS:
        row = f"{scheduler}, {count}"
        if options.only in row and not results.has(row):
            results.add(
                row, model=model.descriptor.sha256, **measure(model.module, scheduler, count)
            )


if __name__ == "__main__":
    main()
