"""What libvips does not read: BMP and TIFF of CIELAB by Pillow, HEIC by pi-heif; as a whole.

pi-heif (extra ``heic``) brings libheif and libde265, both LGPL, without an encoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyvips

from lowtide.core.errors import ImageError
from lowtide.core.install_hints import install_extra
from lowtide.media.formats import HEIC, TIFF, ImageFormat
from lowtide.media.pixels import interpretation_of

# Times the picture's bytes: decoder's planes, its picture, and the copy of libvips.
COPIES = 4
_BLOCKS = {"exif": "exif-data", "xmp": "xmp-data", "icc_profile": "icc-profile-data"}
_MODES = {"1": "L", "P": "RGB"}
_GAIN_MAPS = "gainmap", "gain_map"


def open_whole(path: Path, kind: ImageFormat, *, decode: bool) -> tuple[pyvips.Image, list[str]]:
    """Return a picture and notes on what is beside it; black pixels unless it is to be decoded.

    Raises:
        ImageError: It is damaged, or pi-heif is not installed.
    """
    try:
        readers = {HEIC.name: _open_heic, TIFF.name: _open_lab}
        return readers.get(kind.name, _open_bmp)(path, decode=decode)
    except (OSError, ValueError, SyntaxError, EOFError, RuntimeError) as error:
        raise ImageError(f"{path}: damaged or unsupported {kind.name} file ({error})") from error


def _open_bmp(path: Path, *, decode: bool) -> tuple[pyvips.Image, list[str]]:
    from PIL import BmpImagePlugin

    with BmpImagePlugin.BmpImageFile(str(path)) as image:
        mode = _MODES.get(image.mode, image.mode)
        channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
        pixels = np.asarray(image.convert(mode)) if decode else None
        notes = ["palette expanded"] if image.mode == "P" else []
        return _image(image.size, channels, np.dtype(np.uint8), pixels), notes


def _open_lab(path: Path, *, decode: bool) -> tuple[pyvips.Image, list[str]]:
    from PIL import Image, ImageCms

    with Image.open(path) as image:
        pixels = None
        if decode:
            profiles = (ImageCms.createProfile(name) for name in ("LAB", "sRGB"))
            pixels = np.asarray(ImageCms.profileToProfile(image, *profiles, outputMode="RGB"))
        return _image(image.size, 3, np.dtype(np.uint8), pixels), ["lab converted to sRGB"]


def _open_heic(path: Path, *, decode: bool) -> tuple[pyvips.Image, list[str]]:
    try:
        import pi_heif  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImageError(
            f"{path}: HEIC needs pi-heif, which is not installed",
            hint=install_extra("heic"),
        ) from error
    file: Any = pi_heif.open_heif(str(path), convert_hdr_to_8bit=False)
    first: Any = file[file.primary_index]
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[first.mode.partition(";")[0].replace("a", "A")]
    dtype = np.dtype(np.uint8 if first.info["bit_depth"] == 8 else np.uint16)
    pixels = np.asarray(first) if decode else None
    image = _image(first.size, channels, dtype, pixels)
    image.set_type(pyvips.GValue.gint_type, "bits-per-sample", first.info["bit_depth"])
    for name, field in _BLOCKS.items():
        if first.info.get(name):
            image.set_type(pyvips.GValue.blob_type, field, first.info[name])
    return image, _beside(file, first.info)


def _beside(file: Any, info: dict[str, Any]) -> list[str]:
    notes = []
    if len(file) > 1:
        notes.append(f"picture 1 of {len(file)} read")
    if any(word in name for name in info.get("aux", {}) for word in _GAIN_MAPS):
        notes.append("the gain map of HDR is not kept: the picture is the SDR one")
    if info.get("depth_images"):
        notes.append("the depth map is not kept")
    if info["bit_depth"] != 8:
        notes.append(f"{info['bit_depth']}-bit samples expanded to 16 bits")
    return notes


def _image(
    size: tuple[int, int], channels: int, dtype: np.dtype[Any], pixels: np.ndarray | None
) -> pyvips.Image:
    width, height = size
    space = interpretation_of(channels, "uint8" if dtype == np.uint8 else "uint16")
    if pixels is None:
        black = pyvips.Image.black(width, height, bands=channels)
        return black.cast("uchar" if dtype == np.uint8 else "ushort").copy(interpretation=space)
    rows = np.ascontiguousarray(pixels.reshape(height, width, channels), dtype)
    # Into memory of libvips, which reads rows when the array is no longer there.
    return pyvips.Image.new_from_array(rows).copy(interpretation=space).copy_memory()
