"""Plans of full-size video autoencoders for GPUs of 8, 12 and 16 GB that need not be here.

    python benchmarks/video_vae_cards.py [--only TEXT] [--fresh]

Each row is what ``lowtide plan vae --model MODEL --size SIZE --frames 81 --device GPU`` says, in
bf16. Nothing is computed and no weights are made: all figures are predicted, none is verified on a
GPU. ``plan_seconds`` are the processor seconds that the plan of both parts took.
"""

from __future__ import annotations

import time

from common import ResultFile, row_parser

from lowtide.jobs.vae.plan import plan_vae

MODELS = ("VideoVAE", "AutoencoderKLWan")
SIZES = {"720p": (1280, 720), "1080p": (1920, 1080), "4K": (3840, 2160)}
GPUS = ("rtx4060-8gb", "rtx3060-12gb", "rtx5070ti-16gb")
FRAMES = 81


def main() -> None:
    """Plan what is missing."""
    options = row_parser(__doc__, pairs=1).parse_args()
    results = ResultFile(
        "video_vae_cards",
        fresh=options.fresh,
        packages=("diffusers",),
        environments="any",  # predictions, which do not depend on the machine but for plan_seconds
        about=f"Full-size video autoencoders on GPUs, {FRAMES} frames: predicted, not verified.",
    )
    for model in MODELS:
        for size, sides in SIZES.items():
            for gpu in GPUS:
                row = f"{model}, {size}, {gpu}"
                if options.only in row and not results.has(row):
                    started = time.process_time()
                    plan = plan_vae(model, size=sides, frames=FRAMES, device=gpu)
                    seconds = round(time.process_time() - started, 1)
                    results.add(row, plan_seconds=seconds, **plan.model_dump(mode="json"))


if __name__ == "__main__":
    main()
