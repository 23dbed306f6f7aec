"""Enlarged JPEGs and PNGs by the model that is chosen, next to cubic and the small bundled one.

    python benchmarks/upscale_pictures.py --data FOLDER [--only "x4, q40"] [--fresh]

FOLDER (or the environment variable LOWTIDE_DATA) holds ``images/set5/HR/NAME.png``; with
scikit-image's `coffee` none of these pictures is trained on. A row is one picture made smaller by
Pillow's antialiased cubic filter, kept as a JPEG with chroma at half the resolution or as a PNG,
and enlarged again from file to file by `lowtide.upscale` without a model named. Protocol: BT.601
luma, 8-bit rounding, 8 pixels off all sides.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import ResultFile, row_parser
from PIL import Image

import lowtide
import lowtide.models
from lowtide.core.metrics import psnr_y

ABOUT = "Pictures made smaller, coded and enlarged again; PSNR-Y in dB, 8 pixels cropped"
SCALES, QUALITIES, BORDER = (2, 4), (40, 75, 90, None), 8


def pictures(folder: Path) -> dict[str, Image.Image]:
    """Pictures by name, with sides that all scales divide."""
    import skimage.data

    paths = sorted((folder / "images" / "set5" / "HR").glob("*.png"))
    if not paths:
        raise SystemExit(f"no pictures in {folder}/images/set5/HR")
    found = {path.stem: Image.open(path).convert("RGB") for path in paths}
    found["coffee"] = Image.fromarray(skimage.data.coffee())
    return {
        name: one.crop((0, 0, one.width // 4 * 4, one.height // 4 * 4))
        for name, one in found.items()
    }


def score(path: Path, clean: Image.Image) -> float:
    """PSNR-Y of a file against the picture that it was made of."""
    made = np.asarray(Image.open(path).convert("RGB"))
    return round(float(psnr_y(made, np.asarray(clean), crop=BORDER)), 2)


def enlarged(clean: Image.Image, scale: int, quality: int | None) -> dict[str, object]:
    """Scores of a picture made smaller, coded and enlarged again."""
    size = clean.width // scale, clean.height // scale
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("small.png" if quality is None else "small.jpg")
        options = {} if quality is None else {"quality": quality, "subsampling": 2}
        clean.resize(size, Image.Resampling.BICUBIC).save(path, **options)
        cubic, chosen, plain = (path.with_name(f"{name}.png") for name in ("cubic", "own", "plain"))
        coded = Image.open(path).convert("RGB")
        coded.resize(clean.size, Image.Resampling.BICUBIC).save(cubic)
        report = lowtide.upscale(path, chosen, scale=scale)
        lowtide.upscale(path, plain, model=f"lowtide-x{scale}")
        scores = {name: score(one, clean) for name, one in _named(cubic, chosen, plain)}
    return {**scores, "model": report.model["name"], "model_sha256": report.model["sha256"]}


def _named(*paths: Path) -> list[tuple[str, Path]]:
    return list(zip(("cubic_db", "lowtide_db", "plain_db"), paths, strict=True))


def rows(data: Path) -> dict[tuple[str, str], Callable[[], dict[str, object]]]:
    """What is measured, by kind and picture."""
    clean_pictures = pictures(data)
    return {
        (f"x{scale}, {'PNG' if quality is None else f'q{quality}'}", name): functools.partial(
            enlarged, clean, scale, quality
        )
        for scale in SCALES
        for quality in QUALITIES
        for name, clean in clean_pictures.items()
    }


def main() -> None:
    """Measure the rows that are missing."""
    parser = row_parser(__doc__)
    default = os.environ.get("LOWTIDE_DATA")
    parser.add_argument("--data", type=Path, default=default, required=default is None)
    options = parser.parse_args()
    packages = "scikit-image", "pillow"
    results = ResultFile("upscale_pictures", about=ABOUT, fresh=options.fresh, packages=packages)
    for (kind, name), measure in rows(Path(options.data)).items():
        row = f"{kind}, {name}"
        if options.only in row and not results.has(row):
            results.add(row, kind=kind, **measure())


if __name__ == "__main__":
    main()
