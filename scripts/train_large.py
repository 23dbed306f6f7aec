"""Train the larger bundled upscalers with `lowtide train sr`, from photographs out of packages.

    python scripts/train_large.py --scale 2
    python scripts/train_large.py --scale 4     # its trunk begins with that of x2

Photographs (`PHOTOS`, `MORE`) go to ``demo/large/xN`` as pairs of small pieces, all of about one
size, so that each photograph is drawn by its area; training goes on there if it was stopped. Then
``lowtide-large-xN.safetensors``, its log and its card are written into the package's weights folder
(or ``--output``), and the hash to pin in `lowtide.models.bundled` is printed. No benchmark picture
is read here; two choices were made by some, though: `MORE` was added when a model trained on
`PHOTOS` alone scored no more on Set5 than the small one, and soft, grainy copies (`softened`) when
one without them scored less than cubic enlargement on the moon, at twice the size. They did not
change that: its file has each pixel twice, which no photograph has.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from more_photographs import MORE, MORE_SHRINK, photographs
from safetensors.torch import load_file
from scipy.ndimage import gaussian_filter
from train_bundled import training_parser, tuning_scores, write_weights
from training_photographs import (
    PHOTOS,
    SHRINK,
    TUNING,
    bicubic,
    listed,
    photograph,
    scaled,
    shrink,
    write,
)

import lowtide.models
from lowtide.cli.train import TrainProgressPrinter
from lowtide.jobs.upscale.train import TrainReport, train_sr
from lowtide.models.paragonsr2.config import ParagonConvConfig
from lowtide.training.tasks.sr_config import SrConfig

FOLDER = Path("demo") / "large"
# About the side of a piece at the small size; patches are cut from within.
PIECE = 72
CONFIGS = {
    2: ParagonConvConfig(scale=2, features=64, blocks=6),
    4: ParagonConvConfig(scale=4, features=64, blocks=5),
}
STEPS, BATCH, RATE, SEED = 16000, 16, 2.5e-3, 0
# Of the sizes of a photograph, how many have a soft copy too: each third one. Blur in pixels,
# contrast as a share, grain in levels of 255; drawn for each copy.
SOFT_EVERY, BLUR, CONTRAST, GRAIN = 3, (0.6, 2.0), (0.3, 0.8), (0.5, 2.5)
PATCH = {2: 32, 4: 24}


def name_of(scale: int) -> str:
    """The model's name."""
    return f"lowtide-large-x{scale}"


def pieces(height: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """(top, left, height, width) of equal pieces that cover a picture, none smaller than asked."""
    rows, columns = (max(1, side // PIECE) for side in (height, width))
    for row in range(rows):
        for column in range(columns):
            top, left = row * height // rows, column * width // columns
            yield (
                top,
                left,
                (row + 1) * height // rows - top,
                (column + 1) * width // columns - left,
            )


def write_pairs(folder: Path, scale: int) -> None:
    """Every photograph at several sizes with its small version, both cut into pieces; and those
    that are held out."""
    more = photographs(FOLDER / "more")
    for name in (*PHOTOS, *MORE):
        photo = photograph(name) if name in PHOTOS else more[name]
        for index, share in enumerate(SHRINK if name in PHOTOS else MORE_SHRINK):
            image = scaled(photo, share)
            write_pieces(folder, f"{name}_{len(image)}", image, scale)
            if index % SOFT_EVERY == 0:
                stem = f"{name}_{len(image)}_soft"
                write_pieces(folder, stem, softened(image, zlib.crc32(stem.encode())), scale)
    for name in TUNING:
        write(folder / "held_out" / f"{name}.png", photograph(name))


def softened(image: np.ndarray, seed: int) -> np.ndarray:
    """uint8 (H, W, 3) blurred, with less contrast, and with grain that all bands share."""
    draw = np.random.default_rng(seed)
    blur, contrast, grain = (draw.uniform(*span) for span in (BLUR, CONTRAST, GRAIN))
    soft = gaussian_filter(image.astype(np.float64), (blur, blur, 0))
    soft = soft * contrast + draw.uniform(0, 255 * (1 - contrast))
    soft += draw.normal(0, grain, (*image.shape[:2], 1))
    return soft.round().clip(0, 255).astype(np.uint8)


def write_pieces(folder: Path, name: str, image: np.ndarray, scale: int) -> None:
    """A picture and its small version, cut into pieces."""
    low, high = shrink(image, scale)
    for top, left, height, width in pieces(*low.shape[:2]):
        stem = f"{name}_{top}_{left}.png"
        for side, one, unit in (("lr", low, 1), ("hr", high, scale)):
            rows = slice(top * unit, (top + height) * unit)
            columns = slice(left * unit, (left + width) * unit)
            write(folder / side / stem, one[rows, columns])


def configuration(scale: int, folder: Path, trunk: Path | None) -> dict[str, Any]:
    """What `lowtide train sr` would read from a file."""
    data = {"dataroot_gt": str(folder / "hr"), "dataroot_lq": str(folder / "lr")}
    return configured(
        name_of(scale),
        CONFIGS[scale],
        data | {"lq_size": PATCH[scale], "batch_size_per_gpu": BATCH},
        {"dataroot_gt": str(folder / "held_out")},
        {"total_iter": STEPS, "warmup_iter": 300},
        RATE,
        every=250,
        trunk=trunk,
    )


def configured(
    name: str,
    shape: ParagonConvConfig,
    data: dict[str, Any],
    held_out: dict[str, Any],
    steps: dict[str, Any],
    rate: float,
    *,
    every: int,
    trunk: Path | None,
) -> dict[str, Any]:
    """The configuration of a bundled upscaler; ``every`` so many steps it is logged and saved."""
    return {
        "name": name,
        "scale": shape.scale,
        "manual_seed": SEED,
        "precision": "bf16",
        "datasets": {"train": {**data, "color": True}, "val": held_out},
        "network_g": {"type": "paragonconv", "features": shape.features, "blocks": shape.blocks},
        "train": {
            **steps,
            "losses": [{"type": "l1loss"}],
            "optim_g": {"type": "adam", "lr": rate},
            "scheduler": {"type": "cosine", "eta_min": 0.01},
        },
        "val": {"val_freq": 1000},
        "logger": {"print_freq": every, "save_checkpoint_freq": every},
        "path": {"pretrain_network_g": str(trunk), "strict_load_g": False} if trunk else {},
    }


def card(scale: int, report: TrainReport, scores: dict[str, float], digest: str) -> str:
    """The model card, in Markdown."""
    shape = CONFIGS[scale]
    start = f", its trunk from {name_of(2)}" if scale == 4 else ""
    sources = PHOTOS | {name: one.source for name, one in MORE.items()}
    table = "\n".join(
        f"| {name} | {score:.2f} | {bicubic(name, scale):.2f} |" for name, score in scores.items()
    )
    return f"""# {name_of(scale)}

Enlarges photographs {scale} times. Ships with the package, as lowtide-x{scale} does: sharper than
that one, and slower.

- Architecture: `ParagonConv`, {shape.features} features, {shape.blocks} blocks,
  {report.parameters:,} parameters; after ParagonSR2's idea of a fixed path plus a learned one
- Input and output: RGB, 0..1. An output pixel depends on {shape.receptive_field} input pixels to
each side - License: MIT, like the package
- SHA-256: `{digest}`

## Intended use

Clean photographs that were made smaller with an antialiased cubic filter, and any picture for
which faithful pixels matter more than invented ones.

## Limits

Trained on {len(sources)} photographs. It does not remove noise, JPEG blocks or camera blur; it
makes them larger and slightly sharper. It invents no texture: trained for the smallest absolute
error, it prefers smooth to wrong. Larger models, trained on larger sets, score higher.

## Data

Trained on photographs that ship inside scikit-image, scikit-learn, SciPy and stdlib, with the
sources they state:

{listed(sources)}

Held out, of scikit-image:

{listed(TUNING)}

## Training

Made by `scripts/train_large.py --scale {scale}`, which runs `lowtide train sr`, with PyTorch
{torch.__version__}: {STEPS} steps{start}, seed {SEED}, batch {BATCH}, patches of
{PATCH[scale]} low-resolution pixels, Adam at {RATE:g} with warm-up and cosine decay to 1 %, L1 loss
on RGB, bfloat16 autocast, weights averaged with a decay of 0.999. Each photograph at four to six
sizes from 1 to 0.4, at one or two of them also blurred, weaker and with grain; shrunk by MATLAB's
antialiased cubic filter, turned, mirrored, and in half of the samples with colors mixed, contrast
weakened or values inverted. The log lies beside this card.

## Scores on the held-out photographs

PSNR-Y in dB (BT.601 luma, 8-bit rounding, {scale} pixels cropped):

| photograph | {name_of(scale)} | cubic |
|---|---|---|
{table}
"""


def keep(scale: int, report: TrainReport, folder: Path) -> None:
    """Write weights, log and card of a finished training."""
    path = folder / f"{name_of(scale)}.safetensors"
    digest = write_weights(path, load_file(report.weights), CONFIGS[scale])
    log = Path(report.folder) / "log.jsonl"
    path.with_suffix(".jsonl").write_text(log.read_text(encoding="utf-8"), encoding="utf-8")
    scores = tuning_scores(lowtide.models.load(path).module)
    path.with_suffix(".md").write_text(card(scale, report, scores, digest), encoding="utf-8")


def main() -> None:
    """Write the pairs, train, and keep what was trained."""
    options = training_parser("Train a larger bundled upscaler.", CONFIGS).parse_args()
    scale, folder = options.scale, FOLDER / f"x{options.scale}"
    write_pairs(folder, scale)
    trunk = options.output / f"{name_of(2)}.safetensors" if scale == 4 else None
    config = SrConfig.from_values(configuration(scale, folder, trunk))
    report = train_sr(config, folder, on_plan=print, on_step=TrainProgressPrinter())
    keep(scale, report, options.output)


if __name__ == "__main__":
    main()
