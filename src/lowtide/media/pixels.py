"""Conversion of libvips images to rows: sample types, color spaces, channels, resize."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pyvips

from lowtide.core.errors import ImageError
from lowtide.media.image_info import FULL_SCALE, ImageInfo, SampleType, ValueRange
from lowtide.media.tiff_header import extra_samples

_SAMPLE_OF_FORMAT: dict[str, SampleType] = {
    "uchar": "uint8",
    "ushort": "uint16",
    "float": "float32",
}
_FORMAT_OF_SAMPLE: dict[SampleType, str] = {
    "uint8": "uchar",
    "uint16": "ushort",
    "float32": "float",
}
_UNCONVERTED_SPACES = {"b-w", "grey16", "rgb", "rgb16", "srgb", "scrgb", "multiband"}


def dtype_of(sample: SampleType) -> np.dtype[np.generic]:
    """Return the numpy dtype of a sample type."""
    return np.dtype(sample)


def interpretation_of(channels: int, sample: SampleType) -> str:
    """Return the libvips interpretation (color space) of rows."""
    if channels >= 3:
        return {"uint8": "srgb", "uint16": "rgb16", "float32": "scrgb"}[sample]
    return {"uint8": "b-w", "uint16": "grey16", "float32": "b-w"}[sample]


def enum_text(image: pyvips.Image, name: str) -> str:
    """Return an enum property of ``image`` as text."""
    return str(getattr(image, name))


def select_channels(image: pyvips.Image, path: Path) -> tuple[pyvips.Image, list[str]]:
    """Select the color channels of a decoded TIFF, and alpha if the file declares one.

    Returns the lazy image, and a message about channels that are dropped.
    """
    color = 4 if enum_text(image, "interpretation") == "cmyk" else 3 if image.bands >= 3 else 1
    extra = image.bands - color
    if extra <= 0:
        return image, []
    transparent = (extra_samples(path)[-extra:] + [False] * extra)[:extra]
    alpha = color + transparent.index(True) if True in transparent else None
    dropped = [str(band + 1) for band in range(color, image.bands) if band != alpha]
    if not dropped:
        return image, []
    own = image.extract_band(0, n=color)
    if alpha is not None:
        own = own.bandjoin(image[alpha])
    which = (
        f"channel {dropped[0]} is" if len(dropped) == 1 else f"channels {', '.join(dropped)} are"
    )
    return own, [f"{which} neither color nor alpha according to the file, and dropped"]


def to_gray_or_rgb(image: pyvips.Image, path: Path) -> tuple[pyvips.Image, list[str]]:
    """Convert a decoded image to gray or RGB, with or without alpha, in a sample type.

    Returns the lazy image and a message for each conversion. The sample type is that of the file,
    never guessed from the values. Raises `ImageError` for samples of other types.
    """
    notes: list[str] = []
    space = enum_text(image, "interpretation")
    if space == "cmyk":
        depth = 16 if enum_text(image, "format") == "ushort" else 8
        image = image.icc_transform("srgb", embedded=True, input_profile="cmyk", depth=depth)
        notes.append("CMYK converted to sRGB")
    elif space not in _UNCONVERTED_SPACES:
        image = image.colourspace("srgb")
        notes.append(f"{space} converted to sRGB")
    stored = enum_text(image, "format")
    if stored not in _SAMPLE_OF_FORMAT:
        raise ImageError(
            f"{path}: samples are of type {stored}; 8- and 16-bit unsigned integers and "
            f"32-bit floats can be read"
        )
    image, more = _full_range(image)
    return image, notes + more


def _full_range(image: pyvips.Image) -> tuple[pyvips.Image, list[str]]:
    # AVIF samples of 10 or 12 bits are left-aligned in 16, so that white is below 65,535.
    if not image.get_typeof("heif-primary") or enum_text(image, "format") != "ushort":
        return image, []
    bits = cast(int, image.get("bits-per-sample"))
    white = ((1 << bits) - 1) << (16 - bits)
    scaled = (image * (65_535 / white)).rint().cast("ushort")
    scaled = scaled.copy(interpretation=interpretation_of(image.bands, "uint16"))
    return scaled, [f"{bits}-bit samples expanded to 16 bits"]


def image_info_of(image: pyvips.Image) -> ImageInfo:
    """Return shape and sample type of an image from `to_gray_or_rgb`."""
    sample = _SAMPLE_OF_FORMAT[enum_text(image, "format")]
    return ImageInfo(image.width, image.height, image.bands, sample)


def convert_samples(
    image: pyvips.Image,
    sample: SampleType,
    *,
    bits: int = 16,
    value_range: ValueRange | None = None,
) -> pyvips.Image:
    """Convert an image to another sample type: scaled by white, rounded, clipped.

    ``bits`` below 16 rounds 16-bit samples to that many bits, left-aligned, because the encoder,
    which drops the lower bits, would truncate them. ``value_range`` says what is black and white,
    for samples that stay of their type too unless their bits are less.
    """
    stored = _SAMPLE_OF_FORMAT[enum_text(image, "format")]
    if stored == sample and (sample != "uint16" or bits == 16):
        return image
    low, white = 0.0, float(FULL_SCALE[stored])
    if value_range is not None:
        low, white = value_range.low, value_range.white
    levels = (1 << bits) - 1 if sample == "uint16" else FULL_SCALE[sample]
    gains, offsets = [levels / (white - low)] * image.bands, [-low * levels / (white - low)]
    offsets *= image.bands
    if stored == "float32" and image.bands in (2, 4):  # alpha is in 0..1 whatever the color's range
        gains[-1], offsets[-1] = levels, 0.0
    image = image.linear(gains, offsets)
    image = image.rint() if sample != "float32" else image
    if sample == "uint16" and bits < 16:
        image = image * (1 << (16 - bits))
    image = image.cast(_FORMAT_OF_SAMPLE[sample])
    return image.copy(interpretation=interpretation_of(image.bands, sample))


def resample_image(image: pyvips.Image, width: int, height: int) -> pyvips.Image:
    """Resample to exactly ``width`` x ``height``, streaming, with premultiplied alpha.

    Downscaling uses a Lanczos kernel of three lobes; libvips upscales with a bicubic one.
    """
    sample = _SAMPLE_OF_FORMAT[enum_text(image, "format")]
    white, alpha, space = FULL_SCALE[sample], image.bands in (2, 4), image.interpretation
    # In floats, because for integers libvips also rounds its kernels, to sums other than 1, which
    # darkens an image downscaled 4 times by half a level.
    image = image.premultiply(max_alpha=white) if alpha else image.cast("float")
    across, down = image.width / width, image.height / height
    if min(across, down) >= 1:
        # Width first, so that the second pass keeps short rows.
        image = image.reduceh(across, kernel="lanczos3").reducev(down, kernel="lanczos3")
    else:
        image = image.resize(1 / across, vscale=1 / down, kernel="lanczos3")
    image = image.unpremultiply(max_alpha=white) if alpha else image
    image = image.rint() if sample != "float32" else image
    return image.cast(_FORMAT_OF_SAMPLE[sample]).copy(interpretation=space)
