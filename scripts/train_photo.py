"""Train the bundled upscalers of ordinary photographs with `lowtide train sr`.

    nice -n 19 python scripts/train_photo.py --scale 4 --folder FOLDER
    nice -n 19 python scripts/train_photo.py --scale 2 --folder FOLDER  # from the trunk of x4

They learn `degradation: photo`: JPEGs of quality 30 to 95, a little soft and noisy. Photographs
(`PHOTOS`, `MORE`, `WALLPAPERS`) go to ``FOLDER/xN/hr`` in pieces of about one size, so that each is
drawn by its area; a training that was stopped goes on there. Then ``lowtide-photo-xN.safetensors``,
its log and its card are written into the package's weights folder (or ``--output``), and the hash
to pin in `lowtide.models.bundled` is printed. ``--stage`` does that with the best weights so far,
while a training runs or after it was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from more_photographs import MORE, MORE_SHRINK, WALLPAPER_SIDES, WALLPAPERS, photographs
from safetensors.torch import load_file
from train_bundled import enlarged, training_parser, write_weights
from train_large import BATCH, SEED, configured
from training_photographs import PHOTOS, SHRINK, TUNING, listed, photograph, scaled, shrink, write

import lowtide.models
from lowtide.cli.train import TrainProgressPrinter
from lowtide.core.metrics import psnr_y
from lowtide.jobs.upscale.train import train_sr
from lowtide.models.paragonsr2.config import ParagonConvConfig
from lowtide.models.resample import resize_cubic
from lowtide.training.data.degrade import jpeg_roundtrip
from lowtide.training.tasks.sr_config import SrConfig

# A trunk as deep as this may learn nothing at all from a random start at twice the size: one of 12
# blocks still was cubic enlargement after 9,000 steps.
CONFIGS = {scale: ParagonConvConfig(scale=scale, features=64, blocks=10) for scale in (2, 4)}
STEPS, RATE = 16000, 1e-3
PATCH = {2: 40, 4: 32}
# Side of a piece at full size: patches are cut from within, with some pixels around them.
PIECE = 256
QUALITIES = (None, 75, 40)


def name_of(scale: int) -> str:
    """The model's name."""
    return f"lowtide-photo-x{scale}"


def training_pictures(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every photograph at several sizes, as uint8 (H, W, 3)."""
    wallpapers = photographs(folder, WALLPAPERS)
    more = photographs(folder, MORE)
    for name in (*PHOTOS, *MORE, *WALLPAPERS):
        if name in WALLPAPERS:
            photo = wallpapers[name]
            shares = [side / max(photo.shape) for side in WALLPAPER_SIDES]
        else:
            photo = photograph(name) if name in PHOTOS else more[name]
            shares = SHRINK if name in PHOTOS else MORE_SHRINK
        for share in shares:
            image = scaled(photo, share)
            yield f"{name}_{len(image)}", image


def as_jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    """uint8 (H, W, 3) after a JPEG of a quality, with chroma at half the resolution."""
    coded = jpeg_roundtrip(image.astype(np.float32) / np.float32(255), quality)
    return np.rint(coded * 255).astype(np.uint8)


def write_data(folder: Path, scale: int) -> None:
    """Pieces to train on; and the pictures held out, small, clean and as JPEGs."""
    if (folder / "complete").is_file():
        return
    for name, image in training_pictures(folder.parent / "photographs"):
        rows, columns = (max(1, round(side / PIECE)) for side in image.shape[:2])
        height, width = image.shape[0] // rows, image.shape[1] // columns
        for row in range(rows):
            for column in range(columns):
                part = image[
                    row * height : (row + 1) * height, column * width : (column + 1) * width
                ]
                write(folder / "hr" / f"{name}_{row}_{column}.png", part)
    for name in TUNING:
        low, high = shrink(photograph(name), scale)
        for quality in QUALITIES:
            stem = f"{name}_{quality or 'clean'}.png"
            write(folder / "held_out" / "lr" / stem, as_jpeg(low, quality) if quality else low)
            write(folder / "held_out" / "hr" / stem, high)
    (folder / "complete").touch()


def configuration(scale: int, folder: Path, steps: int, trunk: Path | None) -> dict[str, Any]:
    """What `lowtide train sr` would read from a file."""
    held, data = folder / "held_out", {"dataroot_gt": str(folder / "hr"), "degradation": "photo"}
    return configured(
        name_of(scale),
        CONFIGS[scale],
        data | {"lq_size": PATCH[scale], "batch_size_per_gpu": BATCH},
        {"dataroot_gt": str(held / "hr"), "dataroot_lq": str(held / "lr")},
        {"total_iter": steps, "warmup_iter": 500, "grad_clip": 1.0},
        RATE,
        every=100,
        trunk=trunk,
    )


def held_out_scores(weights: Path, scale: int) -> dict[str, tuple[float, float]]:
    """PSNR-Y in dB of each picture held out: by the model, and by cubic enlargement."""
    model = lowtide.models.load(weights).module
    scores = {}
    for name in TUNING:
        low, high = shrink(photograph(name), scale)
        for quality in QUALITIES:
            given = as_jpeg(low, quality) if quality else low
            cubic = resize_cubic(given, *high.shape[:2])
            row = f"{name}, JPEG of quality {quality}" if quality else name
            scores[row] = psnr_y(enlarged(model, given), high, scale), psnr_y(cubic, high, scale)
    return scores


def card(scale: int, steps: int, path: Path, digest: str) -> str:
    """The model card, in Markdown."""
    shape = CONFIGS[scale]
    start = f" from the trunk of {name_of(4)}" if scale == 2 else ""
    sources = PHOTOS | {name: one.source for name, one in (MORE | WALLPAPERS).items()}
    table = "\n".join(
        f"| {name} | {score:.2f} | {cubic:.2f} |"
        for name, (score, cubic) in held_out_scores(path, scale).items()
    )
    return f"""# {name_of(scale)}

Enlarges photographs {scale} times as people have them: JPEGs, a little soft or noisy. Ships with
the package. JPEG blocks and the noise around edges are removed, not made larger.

- Architecture: `ParagonConv`, {shape.features} features, {shape.blocks} blocks,
  {shape.parameters:,} parameters; after ParagonSR2's idea of a fixed path plus a learned one
- Input and output: RGB, 0..1. An output pixel depends on {shape.receptive_field} input pixels to
each side
- License: MIT, like the package
- SHA-256: `{digest}`

## Intended use

JPEGs of any quality from 30 on, and other photographs that are not quite clean.

## Limits

Trained on {len(sources)} photographs. It invents no texture: trained for the smallest absolute
error, it prefers smooth to wrong, and what a JPEG has lost stays lost. Strong noise is left to a
denoiser. Clean pictures come out a little better from `lowtide-x{scale}` and
`lowtide-large-x{scale}`.

## Data

Trained on photographs that ship inside scikit-image, scikit-learn, SciPy, stdlib and Debian, with
the sources they state:

{listed(sources)}

Held out, of scikit-image:

{listed(TUNING)}

## Training

Made by `scripts/train_photo.py --scale {scale}`, which runs `lowtide train sr` with
`degradation: photo`, with PyTorch {torch.__version__}: {steps} steps{start}, seed {SEED}, batch
{BATCH}, patches of {PATCH[scale]} low-resolution pixels, Adam at {RATE:g} with warm-up and cosine
decay to 1 %, L1 loss on RGB, bfloat16 autocast, weights averaged with a decay of 0.999. Each
photograph at three to six sizes; turned, mirrored, and in half of the samples with colors mixed,
contrast weakened or values inverted. The log lies beside this card.

## Scores on the held-out photographs

PSNR-Y in dB (BT.601 luma, 8-bit rounding, {scale} pixels cropped) of photographs made smaller by an
antialiased cubic filter, as they are and as JPEGs with chroma at half the resolution:

| photograph | {name_of(scale)} | cubic |
|---|---|---|
{table}
"""


def keep(scale: int, run: Path, weights: Path, folder: Path) -> None:
    """Write weights, log and card of a training, finished or not."""
    path = folder / f"{name_of(scale)}.safetensors"
    digest = write_weights(path, load_file(weights), CONFIGS[scale])
    rows = [json.loads(line) for line in (run / "log.jsonl").open(encoding="utf-8")]
    lines = "".join(json.dumps(row) + "\n" for row in rows if row["step"] % 1000 == 0)
    path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
    steps = max(row["step"] for row in rows if row.get("best"))
    path.with_suffix(".md").write_text(card(scale, steps, path, digest), encoding="utf-8")


def main() -> None:
    """Write the pictures, train, and keep what was trained."""
    parser = training_parser("Train a bundled upscaler of photographs.", CONFIGS)
    parser.add_argument("--folder", type=Path, default=Path("demo") / "photo")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--stage", action="store_true", help="keep the best weights so far")
    options = parser.parse_args()
    scale, folder = options.scale, options.folder / f"x{options.scale}"
    run = folder / name_of(scale)
    trunk = options.output / f"{name_of(4)}.safetensors" if scale == 2 else None
    if not options.stage:
        write_data(folder, scale)
        config = SrConfig.from_values(configuration(scale, folder, options.steps, trunk))
        train_sr(config, folder, on_plan=print, on_step=TrainProgressPrinter())
    keep(scale, run, run / "models" / f"{name_of(scale)}_best.safetensors", options.output)


if __name__ == "__main__":
    main()
