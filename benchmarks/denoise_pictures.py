"""The default denoiser on pictures as people have them, next to BM3D, the levels estimated.

    python benchmarks/denoise_pictures.py --data FOLDER [--only "white 25"] [--fresh]

FOLDER (or the environment variable LOWTIDE_DATA) holds ``images/set5/HR/NAME.png``; with
scikit-image's `camera`, which is gray, and `coffee` none of these pictures is trained on. A row is
one picture with one kind of noise, 8 bits, through `lowtide.denoise` from file to file: white noise
that is clipped, noise on a color mosaic that was demosaiced, noise that was blurred and JPEGs of
noise; clean pictures, of which little should change; and flat fields without clipping. BM3D
(`pip install bm3d`, left out where it is not installed) is told the level of white noise. Rows of
other weights than the bundled ones are measured again.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyvips
from common import ResultFile, row_parser
from PIL import Image
from scipy.ndimage import convolve, gaussian_filter

import lowtide
import lowtide.models
from lowtide.core.metrics import psnr
from lowtide.core.philox import philox_generator

ABOUT = "Pictures with noise as people have them, levels estimated; PSNR in dB of 8-bit samples"
LEVELS, QUALITIES = (10, 25, 50), (95, 85, 75)
# Saturated colors and gray, and the sides of a flat field and of its border that does not count.
COLORS, SIDE, BORDER = ((206, 76, 46), (30, 60, 200), (40, 180, 60), (128, 128, 128)), 160, 16
_BILINEAR = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]]) / 4
_GREEN = np.array([[0, 1, 0], [1, 4, 1], [0, 1, 0]]) / 4
_SOFT = 1.5  # pixels of blur


def pictures(folder: Path) -> dict[str, np.ndarray]:
    """Clean pictures with noise to come: float (H, W, C) in levels of 255."""
    import skimage.data

    found = {
        path.stem: np.asarray(Image.open(path).convert("RGB"))
        for path in sorted((folder / "images" / "set5" / "HR").glob("*.png"))
    }
    if not found:
        raise SystemExit(f"no pictures in {folder}/images/set5/HR")
    found |= {"coffee": skimage.data.coffee(), "camera": skimage.data.camera()[..., None]}
    return {name: one.astype(np.float64) for name, one in found.items()}


def texts() -> dict[str, np.ndarray]:
    """Pictures of text, which stay clean."""
    import skimage.data

    return {name: getattr(skimage.data, name)()[..., None] for name in ("page", "text")}


def white(clean: np.ndarray, sigma: float, draw: np.random.Generator) -> np.ndarray:
    """The picture with white noise."""
    return clean + sigma * draw.standard_normal(clean.shape)


def demosaiced(clean: np.ndarray, sigma: float, draw: np.random.Generator) -> np.ndarray:
    """Bilinear demosaicing of a color mosaic with white noise."""
    masks = np.zeros(clean.shape)
    masks[::2, ::2, 0] = masks[1::2, ::2, 1] = masks[::2, 1::2, 1] = masks[1::2, 1::2, 2] = 1
    mosaic = white((clean * masks).sum(2), sigma, draw)[..., None] * masks
    kernels = _BILINEAR, _GREEN, _BILINEAR
    return np.stack([convolve(mosaic[..., c], one) for c, one in enumerate(kernels)], 2)


def blurred(clean: np.ndarray, sigma: float, draw: np.random.Generator) -> np.ndarray:
    """The picture with noise in blotches."""
    noise = gaussian_filter(draw.standard_normal(clean.shape), (_SOFT, _SOFT, 0))
    return clean + sigma * noise / noise.std()


def encoded(samples: np.ndarray, quality: int | None) -> bytes:
    """An 8-bit file of samples (H, W, C): a JPEG of this quality, or a PNG."""
    stream, image = io.BytesIO(), Image.fromarray(as_bytes(samples).squeeze())
    if quality is None:
        image.save(stream, "PNG")
    else:
        image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def as_bytes(samples: np.ndarray) -> np.ndarray:
    """Levels of 255, rounded and clipped."""
    return np.rint(samples).clip(0, 255).astype(np.uint8)


def read(path: Path) -> np.ndarray:
    """Samples (H, W, C) in 0..1."""
    found = np.asarray(Image.open(path)) / 255
    return found if found.ndim == 3 else found[..., None]


Kind = tuple[Callable[..., np.ndarray], int, int | None]
KINDS: dict[str, Kind] = {
    **{f"white {level}": (white, level, None) for level in LEVELS},
    "demosaiced 20": (demosaiced, 20, None),
    "blurred 20": (blurred, 20, None),
    "JPEG q60 of 10": (white, 10, 60),
    "JPEG q60 of 25": (white, 25, 60),
}


def denoised(content: bytes, quality: int | None, clean: np.ndarray | None) -> dict[str, object]:
    """Scores of a file against a clean picture in 0..1, by default against itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("noisy.png" if quality is None else "noisy.jpg")
        path.write_bytes(content)
        target = path.with_name("denoised.png")
        report = lowtide.denoise(path, target)
        (image,) = report.images
        noisy, made = read(path), read(target)
    reference = noisy if clean is None else clean
    return {
        "noisy_db": rounded(psnr(noisy, reference)),
        "lowtide_db": rounded(psnr(made, reference)),
        "sigma": image.sigma,
        "shared": image.shared_by_neighbors,
        "cpu_s": image.cpu_seconds,
        "model": report.model["name"],
        "model_sha256": report.model["sha256"],
    }


def by_bm3d(noisy: np.ndarray, clean: np.ndarray, sigma: float) -> dict[str, object]:
    """BM3D's score, told the level; all values are in 0..1."""
    if importlib.util.find_spec("bm3d") is None:
        return {}
    from bm3d import bm3d, bm3d_rgb  # pyright: ignore[reportMissingImports]

    started = time.process_time()
    made = bm3d(noisy[..., 0], sigma)[..., None] if noisy.shape[2] == 1 else bm3d_rgb(noisy, sigma)
    seconds = time.process_time() - started
    return {"bm3d_db": rounded(psnr(made.clip(0, 1), clean)), "bm3d_cpu_s": round(seconds, 2)}


def rounded(decibels: float) -> float | None:
    """As result files have it: None for equal samples."""
    return None if np.isinf(decibels) else round(float(decibels), 2)


def flat_field(color: tuple[int, ...], sigma: int) -> dict[str, object]:
    """What is left of noise on one color without clipping, and the shift, in levels of 255."""
    clean = np.full((SIDE, SIDE, 3), color, np.float32) / 255
    noisy = clean + np.float32(sigma / 255) * philox_generator(0, 4, sigma, 0).standard_normal(
        clean.shape
    )
    with tempfile.TemporaryDirectory() as folder:
        path, target = Path(folder) / "noisy.tif", Path(folder) / "denoised.tif"
        pyvips.Image.new_from_array(noisy.astype(np.float32)).write_to_file(str(path))
        report = lowtide.denoise(path, target)
        made = pyvips.Image.new_from_file(str(target)).numpy()
    left = 255 * (made - clean)[BORDER:-BORDER, BORDER:-BORDER]
    return {
        "sigma": report.images[0].sigma,
        "left": round(float(left.std((0, 1)).max()), 2),
        "shift": round(float(np.abs(left.mean((0, 1))).max()), 2),
        "model_sha256": report.model["sha256"],
    }


def noisy_row(kind: str, clean: np.ndarray) -> dict[str, object]:
    """Scores of a picture with one of `KINDS` of noise."""
    make, sigma, quality = KINDS[kind]
    noisy = make(clean, sigma, philox_generator(0, 3, sigma, 0))
    figures = denoised(encoded(noisy, quality), quality, clean / 255)
    if make is white and quality is None:
        figures |= by_bm3d(as_bytes(noisy) / 255, clean / 255, sigma / 255)
    return figures


def clean_row(clean: np.ndarray, quality: int | None) -> dict[str, object]:
    """How close a clean picture stays to itself."""
    return denoised(encoded(clean, quality), quality, None)


def rows(data: Path) -> dict[tuple[str, str], Callable[[], dict[str, object]]]:
    """What is measured, by kind and picture."""
    found: dict[tuple[str, str], Callable[[], dict[str, object]]] = {}
    clean_pictures = pictures(data)
    for kind in KINDS:
        for name, clean in clean_pictures.items():
            if clean.shape[2] == 3 or kind.startswith("white"):
                found[kind, name] = functools.partial(noisy_row, kind, clean)
    for name, clean in (clean_pictures | texts()).items():
        for quality in (None, *QUALITIES):
            kind = "clean" if quality is None else f"clean, JPEG q{quality}"
            found[kind, name] = functools.partial(clean_row, clean, quality)
    for sigma in LEVELS[:2]:
        for color in COLORS:
            found[f"flat {sigma}", str(color)] = functools.partial(flat_field, color, sigma)
    return found


def main() -> None:
    """Measure the rows that are missing."""
    parser = row_parser(__doc__)
    default = os.environ.get("LOWTIDE_DATA")
    parser.add_argument("--data", type=Path, default=default, required=default is None)
    options = parser.parse_args()
    packages = ("scikit-image", "scipy", "pillow")
    packages += ("bm3d",) * (importlib.util.find_spec("bm3d") is not None)
    results = ResultFile("denoise_pictures", about=ABOUT, fresh=options.fresh, packages=packages)
    bundled = {
        lowtide.models.describe_bundled(name).sha256 for name in lowtide.models.bundled_names()
    }
    for (kind, name), measure in rows(Path(options.data)).items():
        row = f"{kind}, {name}"
        if options.only not in row:
            continue
        if results.has(row):
            if results.row(row)["model_sha256"] in bundled:
                continue
            results.drop([row])
        results.add(row, kind=kind, **measure())


if __name__ == "__main__":
    main()
