"""Pictures and files that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from lowtide.media import EncodeOptions, ImageMetadata, open_image, open_sink
from lowtide.media.image_info import ImageInfo, SampleType

FULL = {"uint8": 255, "uint16": 65_535, "float32": 1.0}


def make_rows(height: int, width: int, bands: int, sample: SampleType = "uint8") -> np.ndarray:
    """A smooth picture with some noise, so that lossy formats stay close to it."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (9 + band) + band) * np.cos(y / (11 - band)) for band in range(bands)]
    picture = 0.5 + 0.4 * np.stack(waves, axis=-1)
    picture += np.random.default_rng(0).normal(0, 0.002, picture.shape)
    scaled = np.clip(picture, 0, 1) * FULL[sample]
    return scaled.astype(sample) if sample == "float32" else np.rint(scaled).astype(sample)


def info_of(rows: np.ndarray) -> ImageInfo:
    height, width, bands = rows.shape
    return ImageInfo(width, height, bands, rows.dtype.name)  # pyright: ignore[reportArgumentType]


def write_image(
    path: Path,
    rows: np.ndarray,
    *,
    step: int = 10,
    metadata: ImageMetadata | None = None,
    options: EncodeOptions | None = None,
    resize_to: tuple[int, int] | None = None,
    strip_metadata: bool = False,
) -> Path:
    sink = open_sink(
        path,
        info_of(rows),
        metadata=metadata,
        options=options,
        resize_to=resize_to,
        strip_metadata=strip_metadata,
    )
    with sink:
        for top in range(0, len(rows), step):
            sink.write(top, rows[top : top + step])
        return sink.commit()


def read_image(path: Path, *, step: int = 7, scratch_dir: Path | None = None) -> np.ndarray:
    with open_image(path, scratch_dir=scratch_dir) as source:
        places = range(0, source.info.height, step)
        rows = np.concatenate([source.read(top, top + step) for top in places])
        assert rows.shape == (source.info.height, source.info.width, source.info.channels)
        return rows


def unit(rows: np.ndarray) -> np.ndarray:
    """Samples as floats 0..1."""
    return rows.astype(np.float64) / FULL[rows.dtype.name]


def make_exif(orientation: int) -> bytes:
    """An EXIF block with this orientation, a date, a maker note and a position."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "Maker"
    photo = exif.get_ifd(0x8769)
    photo[0x9003] = "2020:01:02 03:04:05"
    photo[0x927C] = bytes(range(64))
    gps = exif.get_ifd(0x8825)
    gps[1], gps[2] = "N", (10.0, 20.0, 30.5)
    return exif.tobytes()
