"""PSNR-Y on Set5: cubic enlargement, the bundled models, and any model file.

    python benchmarks/set5.py --data FOLDER [--model craft_x4.pth ...] [--fresh]

FOLDER (or the environment variable LOWTIDE_DATA) holds ``images/set5/HR/NAME.png`` and
``images/set5/LR_bicubic/XN/NAMExN.png``, the low-resolution pictures made by MATLAB. Each
picture is run whole, in fp32 on the CPU, and once more in small tiles by the job, whose stated
error is compared with the error it has. Protocol: result rounded to 8 bits, BT.601 luma,
enlargement factor cropped on all sides; the mean is over pictures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import ResultFile
from PIL import Image

import lowtide
import lowtide.models
from lowtide.core.metrics import psnr, psnr_y
from lowtide.models.loaded_model import Model, SelfEnsemble
from lowtide.models.resample import resize_cubic

ABOUT = "PSNR-Y in dB on Set5: 8-bit rounding, BT.601 luma, crop = scale"
CUBIC_SCALES = (2, 4)
# Share of samples of a result exact up to rounding that may differ by one level.
_ROUNDED = 1e-3


def read(path: Path) -> np.ndarray:
    """A picture as uint8 (H, W, 3)."""
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


def pictures(folder: Path, scale: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name to (low, high); the high one cropped to whole low-resolution pixels."""
    found = {}
    for path in sorted((folder / "HR").glob("*.png")):
        low = read(folder / "LR_bicubic" / f"X{scale}" / f"{path.stem}x{scale}.png")
        high = read(path)[: low.shape[0] * scale, : low.shape[1] * scale]
        found[path.stem] = (low, high)
    if not found:
        raise SystemExit(f"no pictures in {folder / 'HR'}")
    return found


def cubic(low: np.ndarray, scale: int) -> np.ndarray:
    """MATLAB's cubic enlargement."""
    return resize_cubic(low, low.shape[0] * scale, low.shape[1] * scale)


def by_model(model: lowtide.models.Model) -> Callable[[np.ndarray, int], np.ndarray]:
    """The model as a function on uint8 pictures."""

    def enlarge(low: np.ndarray, scale: int) -> np.ndarray:
        image = torch.from_numpy(low).permute(2, 0, 1)[None].float() / 255.0
        result = (model(image)[0] * 255.0).round().byte()
        return result.permute(1, 2, 0).numpy()

    return enlarge


def measure(
    results: ResultFile,
    folder: Path,
    row: str,
    scale: int,
    enlarge: Callable[[np.ndarray, int], np.ndarray],
    **facts: object,
) -> None:
    """Add one row: every picture and the mean."""
    if results.has(row):
        return
    scores = {
        name: psnr_y(enlarge(low, scale), high, scale)
        for name, (low, high) in pictures(folder, scale).items()
    }
    mean = round(float(np.mean(list(scores.values()))), 3)
    rounded = {name: round(score, 3) for name, score in scores.items()}
    results.add(row, scale=scale, mean_db=mean, pictures_db=rounded, **facts)


def measure_tiled(results: ResultFile, folder: Path, model: str, name: str, scale: int) -> None:
    """The job with small tiles: what it states about its error, and what that error is.

    The statement must hold for every picture: the tiled file against the whole file. What is exact
    but for rounding may still be rounded to the next of 255 levels here and there.
    """
    row = f"{name}, tiles of 48 px with overlap 16"
    if results.has(row):
        return
    stated, actual, scores, held = {}, {}, {}, []
    with tempfile.TemporaryDirectory() as scratch:
        whole, tiled = Path(scratch) / "whole.png", Path(scratch) / "tiled.png"
        for picture, (_, high) in pictures(folder, scale).items():
            low = folder / "LR_bicubic" / f"X{scale}" / f"{picture}x{scale}.png"
            common = dict(model=model, device="cpu", force=True)
            lowtide.upscale(low, whole, strategy="whole", **common)
            report = lowtide.upscale(low, tiled, tile=48, tile_overlap=16, **common)
            accuracy = report.images[0].accuracy
            assert accuracy is not None
            figure = accuracy.execution_error
            stated[picture] = figure.psnr_db if figure is not None else None
            pieces, full = read(tiled), read(whole)
            level = psnr(pieces / 255.0, full / 255.0)
            actual[picture] = None if np.isinf(level) else round(level, 2)
            scores[picture] = psnr_y(pieces, high, scale)
            difference = np.abs(pieces.astype(int) - full)
            # None is no difference at all; 0.01 dB is the rounding of the statement itself.
            held.append(
                difference.max() <= 1 and difference.mean() <= _ROUNDED
                if figure is None
                else level >= figure.psnr_db - 0.01
            )
    results.add(
        row,
        scale=scale,
        mean_db=round(float(np.mean(list(scores.values()))), 3),
        stated_execution_db=stated,
        actual_execution_db=actual,
        statement_holds=all(held),
    )


def main() -> None:
    """Parse the command line and measure what is missing."""
    parser = argparse.ArgumentParser(description="PSNR-Y on Set5.")
    default = os.environ.get("LOWTIDE_DATA")
    parser.add_argument("--data", type=Path, default=default, required=default is None)
    parser.add_argument(
        "--model", action="append", default=[], help="model file in addition to the bundled ones"
    )
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    folder = Path(options.data) / "images" / "set5"
    results = ResultFile("set5", about=ABOUT, fresh=options.fresh)
    for scale in CUBIC_SCALES:
        measure(results, folder, f"cubic x{scale}", scale, cubic)
    upscalers = [
        name
        for name in lowtide.models.bundled_names()
        if lowtide.models.describe_bundled(name).scale > 1
    ]
    for name in (*upscalers, *options.model):
        model = lowtide.models.load(name)
        facts = model.descriptor
        if (facts.in_channels, facts.out_channels) != (3, 3) or facts.scale not in (2, 3, 4):
            raise SystemExit(f"{name}: Set5 needs an RGB model for x2, x3 or x4")
        measure(
            results,
            folder,
            facts.name,
            facts.scale,
            by_model(model),
            architecture=facts.architecture,
            parameters=facts.parameters,
            sha256=facts.sha256,
        )
        if name in upscalers:
            eight = Model(SelfEnsemble(model.module), facts)
            measure(results, folder, f"{facts.name}, self-ensemble", facts.scale, by_model(eight))
        measure_tiled(results, folder, name, facts.name, facts.scale)


if __name__ == "__main__":
    main()
