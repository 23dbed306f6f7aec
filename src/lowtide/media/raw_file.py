"""Camera RAW files: the sensor's values with their color filter array, and their development.

A mosaic also comes as planes, one for each place of its filter array's period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.errors import ImageError, UsageError, install_extra
from lowtide.core.input_file import require_input
from lowtide.core.signal import ClosedOnExit
from lowtide.media.detect import HEAD_BYTES, camera_raw, describe_file_kind
from lowtide.media.formats import identify_format
from lowtide.media.image_info import ImageInfo

if TYPE_CHECKING:
    import rawpy

# LibRaw takes no smaller image for one.
_LEAST_SIDE = 22


def load_rawpy() -> ModuleType:
    """Import rawpy; raises `UsageError` where it is not installed."""
    try:
        import rawpy
    except ImportError as error:
        raise UsageError(
            "camera RAW files need rawpy, which is not installed",
            hint=install_extra("raw"),
        ) from error
    return rawpy


class RawFile:
    """Open camera RAW file, whose values are in memory once, as LibRaw holds them.

    Attributes:
        values: View of the visible part: a mosaic (H, W), or three colors (H, W, 3), uint16 in
            levels of the file. What is written to it is what `develop` develops.
        colors: Color of each place of the filter array's period (P, P), as an index of ``names``,
            beginning at the first visible pixel; (0, 1, 2) of three colors, and one of a sensor
            without colors.
        names: Letter of each color, such as ``RGBG``; ``gray`` alone without colors.
        black: Level without light of each place or color, of the shape of ``colors``.
        white: Level at which the sensor saturates.
        iso: ISO of the file, or None.
        frame: The part of the development that is the picture.
        held_bytes: Bytes of the values, with what lies around the visible part.
    """

    def __init__(self, path: Path, black_level: float | None = None) -> None:
        self.path, library = path, load_rawpy()
        self._handle: rawpy.RawPy = _open(path, library)
        raw = self._handle
        sizes = raw.sizes
        top, left = sizes.top_margin, sizes.left_margin
        self.names: Sequence[str] = raw.color_desc.decode("ascii", "replace")
        pattern = raw.raw_pattern
        values = raw.raw_image_visible
        if values.shape[:2] != (sizes.height, sizes.width):
            raise ImageError(
                f"{path}: the sensor's rows are not those of the picture, as of sensors turned by"
                f" 45°: {values.shape[1]} × {values.shape[0]} values for {sizes.width} ×"
                f" {sizes.height} pixels",
                hint="develop it first with the camera maker's program",
            )
        if pattern is None:
            self.values, self.colors = values[..., :3], np.arange(3)
        elif raw.num_colors == 1:
            self.values, self.colors, self.names = values, np.zeros((1, 1), np.int64), ("gray",)
        else:
            period = len(pattern)
            self.values = values
            self.colors = np.roll(pattern, (-top % period, -left % period), (0, 1))
        self._black_level, self._users = black_level, 1
        levels = np.asarray(raw.black_level_per_channel, np.float32)
        self.black = levels[self.colors]
        if black_level is not None:
            self.black = np.full_like(self.black, black_level)
        self.white = float(raw.white_level)
        speed = raw.other.iso_speed
        self.iso = round(speed) if np.isfinite(speed) and 0 < speed < 10_000_000 else None
        self.frame = DevelopedFrame.of(sizes)
        self.held_bytes = raw.raw_image.nbytes
        if self.white <= self.black.max():
            raise ImageError(
                f"{path}: the black level {self.black.max():g} is not below the white level"
                f" {self.white:g}",
                hint="give the right one: --black-level N",
            )

    @property
    def is_xtrans(self) -> bool:
        """Whether the filter array is one of 6 × 6, as Fujifilm's."""
        return self.colors.ndim == 2 and len(self.colors) == 6

    @property
    def other(self) -> Any:
        """Exposure, lens and time, as rawpy names them."""
        return self._handle.other

    def develop(self, *, bits: int, linear: bool) -> np.ndarray:
        """Return the upright picture (H, W, C) of the values, uint8 or uint16 by ``bits``.

        C is 3, or 1 of a sensor without colors. Pixels that are not square are stretched, and the
        file's crop is taken. With the camera's white balance, in sRGB. ``linear`` values are in
        proportion to light, 0 at the black and the largest at the white level; others have sRGB's
        curve and LibRaw's automatic brightness.

        Raises:
            ImageError: LibRaw cannot develop it, the picture is of another size than was planned,
                or all black.
        """
        library = load_rawpy()
        black: dict[str, Any] = {}
        if self._black_level is not None:
            black["user_black"] = round(self._black_level)
        try:
            picture = self._handle.postprocess(
                use_camera_wb=True,
                output_bps=bits,
                output_color=library.ColorSpace.sRGB,
                gamma=(1, 1) if linear else (2.4, 12.92),
                no_auto_bright=linear,
                # White is the file's, and not what the brightest value happens to be.
                adjust_maximum_thr=0,
                **black,
            )
        except library.LibRawUnsufficientMemoryError as error:
            raise MemoryError(f"{self.path}: no memory to develop it") from error
        except library.LibRawError as error:
            raise ImageError(
                f"{self.path}: LibRaw cannot develop it ({_text(error)})",
                hint="--raw-output mosaic writes the sensor's values",
            ) from error
        if not picture.any():
            raise ImageError(
                f"{self.path}: the development is all black: levels are"
                f" {self.values.min()} to {self.values.max()}, black {self.black.max():g}, white"
                f" {self.white:g}",
                hint="--black-level N if black is wrong, or --raw-output mosaic",
            )
        if picture.shape[:2] != self.frame.whole:
            height, width = self.frame.whole
            raise ImageError(
                f"{self.path}: LibRaw develops {picture.shape[1]} × {picture.shape[0]} pixels,"
                f" where the file's header tells {width} × {height}",
                hint="--raw-output mosaic writes the sensor's values",
            )
        return self.frame.cut(picture)

    def share(self) -> RawFile:
        """Return itself for one more user, each of which closes it."""
        self._users += 1
        return self

    def close(self) -> None:
        """Release the memory when the last user has closed it; ``values`` are invalid then."""
        self._users -= 1
        if self._users:
            return
        self.values = np.empty((0, 0), np.uint16)
        self._handle.close()


@dataclass(frozen=True)
class DevelopedFrame:
    """The part of LibRaw's development that is the picture: the camera's own crop, or all.

    Attributes:
        height, width: Size of the development as the sensor lies, with its pixels made square.
        rows, columns: The part, each from its first place to before the last.
        flip: LibRaw's turns of it: 4 swaps the sides, after 2 and 1 mirrored rows and columns.
        crop: (W, H) of the file's crop, such as a DNG's DefaultCrop, as the sensor lies; None where
            there is none, or it leaves out nothing.
    """

    height: int
    width: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    flip: int
    crop: tuple[int, int] | None

    @classmethod
    def of(cls, sizes: Any) -> DevelopedFrame:
        """Return it for rawpy's sizes of a file.

        A crop to half a side or less, or beyond the sensor, is not taken.
        """
        across, down = max(sizes.pixel_aspect, 1.0), 1 / min(sizes.pixel_aspect, 1.0)
        rows = _part(sizes.crop_top_margin - sizes.top_margin, sizes.crop_height, sizes.height)
        columns = _part(sizes.crop_left_margin - sizes.left_margin, sizes.crop_width, sizes.width)
        crop = sizes.crop_width, sizes.crop_height
        return cls(
            int(sizes.height * down + 0.5),
            int(sizes.width * across + 0.5),
            (round(rows[0] * down), int(rows[1] * down + 0.5)),
            (round(columns[0] * across), int(columns[1] * across + 0.5)),
            sizes.flip,
            crop if all(crop) and crop != (sizes.width, sizes.height) else None,
        )

    @property
    def is_cropped(self) -> bool:
        """Whether the picture is less than the development."""
        return (self.rows, self.columns) != ((0, self.height), (0, self.width))

    @property
    def whole(self) -> tuple[int, int]:
        """(H, W) of the whole development, upright."""
        return (self.width, self.height) if self.flip & 4 else (self.height, self.width)

    @property
    def size(self) -> tuple[int, int]:
        """(W, H) of the picture, upright."""
        (top, bottom), (left, right) = self.rows, self.columns
        width, height = right - left, bottom - top
        return (height, width) if self.flip & 4 else (width, height)

    def cut(self, picture: np.ndarray) -> np.ndarray:
        """Return the view of the part of an upright development (H, W, C)."""
        down, across = -1 if self.flip & 2 else 1, -1 if self.flip & 1 else 1
        lying = (picture.swapaxes(0, 1) if self.flip & 4 else picture)[::down, ::across]
        part = lying[slice(*self.rows), slice(*self.columns)][::down, ::across]
        return part.swapaxes(0, 1) if self.flip & 4 else part


def _part(first: int, size: int, whole: int) -> tuple[int, int]:
    inside = first >= 0 and first + size <= whole < 2 * size
    return (first, first + size) if inside else (0, whole)


def _open(path: Path, library: ModuleType) -> rawpy.RawPy:
    """Open and decode a file; raises `ImageError` where LibRaw cannot."""
    head = _head(path)
    raw = library.RawPy()
    try:
        raw.open_file(str(path))
        raw.unpack()
    except library.LibRawError as error:
        raise _unreadable(path, head, error) from error
    except UnicodeEncodeError as error:
        raise ImageError(
            f"{str(path)!r}: LibRaw cannot open a name that is not valid text",
            hint="rename the file",
        ) from error
    pattern = raw.raw_pattern
    if pattern is None and raw.num_colors != 3:
        raise ImageError(
            f"{path}: {raw.num_colors} colors without a filter array are not supported",
            hint="develop it first with the camera maker's program",
        )
    return raw


def _head(path: Path) -> bytes:
    require_input(path, ImageError)
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise ImageError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise ImageError(f"{path}: the file is empty (0 bytes)")
    return head


def _unreadable(path: Path, head: bytes, error: Exception) -> ImageError:
    """Return the error for a file that LibRaw does not read: damaged, or no RAW at all."""
    text, size = _text(error), path.stat().st_size
    kind = camera_raw(path, head)
    if kind is None:
        picture = identify_format(head)
        found = describe_file_kind(head) if picture is None else f"a {picture.name} by its content"
        return ImageError(
            f"{path}: no camera RAW file, but {found} ({size:,} bytes; LibRaw: {text})",
            hint="--kind image if it is a picture",
        )
    return ImageError(
        f"{path}: damaged, cut short or unsupported ({kind}, {size:,} bytes; LibRaw: {text})",
        hint="copy it from the camera again; LibRaw reads images of at least"
        f" {_LEAST_SIDE} × {_LEAST_SIDE} pixels",
    )


def _text(error: Exception) -> str:
    words = error.args[0] if error.args else ""
    return words.decode("utf-8", "replace") if isinstance(words, bytes) else str(words)


@dataclass(frozen=True)
class RawPlanesInfo(ImageInfo):
    """Size of planes of raw values, none of which is alpha."""

    sample_type: str = "uint16"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def alpha(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class MosaicLayout:
    """How rows of a mosaic (H, W) become rows of planes (H', W', ``period``²), and back.

    The planes begin ``top`` rows and ``left`` columns before the mosaic, and at least end with it:
    what is beyond takes the values of the nearest period. With a period of 1 colors are planes.
    """

    period: int = 1
    top: int = 0
    left: int = 0

    def info(self, values: tuple[int, ...]) -> RawPlanesInfo:
        """Return the size of the planes of an array (H, W) or (H, W, C)."""
        height, width, *colors = values
        channels = colors[0] if colors else self.period**2
        high, wide = (
            -(-(before + size) // self.period)
            for before, size in ((self.top, height), (self.left, width))
        )
        return RawPlanesInfo(wide, high, channels)

    def gather(self, values: np.ndarray, first: int, last: int) -> np.ndarray:
        """Return rows ``first`` to before ``last`` of the planes, (N, W', C)."""
        if values.ndim == 3:
            return values[first:last].copy()
        info = self.info(values.shape)
        rows = self._places(first, last, self.top, values.shape[0])
        columns = self._places(0, info.width, self.left, values.shape[1])
        chosen = values[rows[:, None], columns]
        blocks = chosen.reshape(last - first, self.period, info.width, self.period)
        return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(last - first, info.width, -1)

    def scatter(self, planes: np.ndarray, first: int, values: np.ndarray) -> None:
        """Write rows (N, W', C) of the planes from row ``first`` on into ``values``."""
        if values.ndim == 3:
            values[first : first + len(planes)] = planes
            return
        period = self.period
        blocks = planes.reshape(len(planes), -1, period, period).swapaxes(1, 2)
        mosaic = blocks.reshape(len(planes) * period, -1)
        start = first * period - self.top
        inside = mosaic[max(-start, 0) :, self.left : self.left + values.shape[1]]
        at = max(start, 0)
        inside = inside[: values.shape[0] - at]
        values[at : at + len(inside)] = inside

    def _places(self, first: int, last: int, before: int, size: int) -> np.ndarray:
        """Return indices into an axis of the mosaic for so many periods of the planes."""
        places = np.arange(first * self.period, last * self.period) - before
        period = max(self.period, before + 1)
        beyond = np.maximum(-(-(places - size + 1) // period), 0)
        places = places - period * beyond + period * (places < 0)
        return places.clip(0, size - 1)


class RawSource(ClosedOnExit):
    """`lowtide.media.image_info.ImageRowReader` of a RAW file's planes; any rows, again too.

    Args:
        raw: The file, which is closed with the source.
    """

    def __init__(self, raw: RawFile, layout: MosaicLayout) -> None:
        self.raw, self.layout = raw, layout
        self.info: ImageInfo = layout.info(raw.values.shape)
        self.dtype: np.dtype[np.generic] = np.dtype(np.uint16)
        self._open = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H', W', C) of the planes."""
        return self.info.shape

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W', C); none below the image."""
        first, last = (min(one, self.info.height) for one in (first, last))
        return self.layout.gather(self.raw.values, first, last)

    def close(self) -> None:
        """Release the file; may be called more than once."""
        if self._open:
            self.raw.close()
            self._open = False
