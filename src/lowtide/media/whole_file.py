"""Pictures that are not read by rows as they are: decoded as a whole, or turned by way of the disk.

libvips does not read BMP and TIFF of CIELAB, which Pillow does, nor HEIC. That pi-heif (extra
``heic``) does, with libheif and libde265, both LGPL, without an encoder.

What must be rotated by EXIF orientation is stored in blocks of rows. For orientations 5 to 8 each
block is stored transposed, so that the columns which make a batch of upright rows are one
contiguous read per block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyvips

from lowtide.core.atomic_file import is_disk_full
from lowtide.core.errors import ImageError, OutputError, install_extra
from lowtide.core.units import format_bytes
from lowtide.media.formats import HEIC, TIFF, ImageFormat
from lowtide.media.image_info import ImageInfo
from lowtide.media.pixels import dtype_of, interpretation_of

# Times the picture's bytes: decoder's planes, its picture, and the copy of libvips.
COPIES = 4
_BLOCKS = {"exif": "exif-data", "xmp": "xmp-data", "icc_profile": "icc-profile-data"}
_MODES = {"1": "L", "P": "RGB"}
_GAIN_MAPS = "gainmap", "gain_map"

_BLOCK_BYTES = 4 << 20


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


def upright_info(info: ImageInfo, orientation: int) -> ImageInfo:
    """Return ``info`` of the upright image: orientations 5 to 8 swap width and height."""
    if orientation < 5:
        return info
    return ImageInfo(info.height, info.width, info.channels, info.sample_type)


def spool_bytes(info: ImageInfo, orientation: int) -> int:
    """Return the spool's bytes on disk: 0 for orientations 1 and 2, else the image's."""
    return 0 if orientation in (1, 2) else info.height * info.row_bytes


def spool_memory(info: ImageInfo, orientation: int) -> int:
    """Return the host memory of the spool in bytes.

    It is a block, its transposed copy, and as much read back.
    """
    return 0 if orientation in (1, 2) else 4 * _rows_per_block(info) * info.row_bytes


def _rows_per_block(info: ImageInfo) -> int:
    return min(max(16, _BLOCK_BYTES // info.row_bytes), info.height)


class RowSpool:
    """Temporary file of rows, read back upright for EXIF orientations 3 to 8.

    The file has no name: it is removed when it is closed or the process dies.
    """

    def __init__(self, info: ImageInfo, orientation: int, scratch_dir: Path | None) -> None:
        """Open an empty spool for rows like ``info``.

        ``scratch_dir`` defaults to the system's temporary folder. Raises `OutputError` if the
        file cannot be created there.
        """
        self._info = info
        self._orientation = orientation
        self._folder = Path(scratch_dir or tempfile.gettempdir())
        self._block_rows = _rows_per_block(info)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failure(error) from error

    def fill(self, read: Callable[[int], np.ndarray]) -> None:
        """Store all rows of the image, from repeated calls of ``read(count)``.

        ``read`` returns the next (count, W, C). Raises `OutputError` if the scratch folder is full.
        """
        for top in range(0, self._info.height, self._block_rows):
            rows = read(min(self._block_rows, self._info.height - top))
            if self._orientation >= 5:
                rows = np.ascontiguousarray(rows.transpose(1, 0, 2))
            view = rows.data.cast("B")
            try:
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:
                raise self._failure(error) from error

    def read(self, top: int, count: int) -> np.ndarray:
        """Return the upright rows ``top`` to ``top + count``, (rows, W, C)."""
        if count == 0:
            return self._empty(0, upright_info(self._info, self._orientation).width)
        if self._orientation in (3, 4):
            first = self._info.height - top - count
            rows = self._read_rows(first, count)[::-1]
            return np.ascontiguousarray(rows[:, ::-1] if self._orientation == 3 else rows)
        # 5 is the transpose, 6 also reverses columns, 8 rows, 7 both.
        from_right = self._orientation in (7, 8)
        first = self._info.width - top - count if from_right else top
        rows = self._read_columns(first, count)
        rows = rows[::-1] if from_right else rows
        return np.ascontiguousarray(rows[:, ::-1] if self._orientation in (6, 7) else rows)

    def _read_rows(self, first: int, count: int) -> np.ndarray:
        rows = self._empty(count, self._info.width)
        self._read_into(rows, first * self._info.row_bytes)
        return rows

    def _read_columns(self, first: int, count: int) -> np.ndarray:
        rows = self._empty(count, self._info.height)
        pixel = self._info.row_bytes // self._info.width
        for top in range(0, self._info.height, self._block_rows):
            high = min(self._block_rows, self._info.height - top)
            block = self._empty(count, high)
            self._read_into(block, top * self._info.row_bytes + first * high * pixel)
            rows[:, top : top + high] = block
        return rows

    def _empty(self, height: int, width: int) -> np.ndarray:
        return np.empty((height, width, self._info.channels), dtype_of(self._info.sample_type))

    def _read_into(self, array: np.ndarray, offset: int) -> None:
        view = array.data.cast("B")
        self._file.seek(offset)
        while view:
            count = self._file.readinto(view)
            if not count:
                at = self._file.tell()
                raise OutputError(f"{self._folder}: the scratch file ended early, at byte {at:,}")
            view = view[count:]

    def _failure(self, error: OSError) -> OutputError:
        needed = spool_bytes(self._info, self._orientation)
        what = "is full" if is_disk_full(error) else f"cannot be used ({error.strerror})"
        return OutputError(
            f"{self._folder}: the scratch folder {what}; this image has to be rotated by its "
            f"EXIF orientation, which needs {needed:,} bytes ({format_bytes(needed)}) there",
            hint="--scratch DIR on a disk with more free space",
        )

    def close(self) -> None:
        """Close and remove the file; may be called more than once."""
        self._file.close()
