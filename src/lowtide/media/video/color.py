"""Conversion of stored planes to R'G'B' and back, by rows, in float32 and by ITU-T H.273.

Chroma is interpolated linearly at the place that its location says. The way back filters it by the
short kernel whose samples, interpolated again, are the same: an identity gives back the very codes
of all planes, and no round of reading and writing blurs or shifts colors. (On photographs this
kernel is also nearer to the picture than averages are, by 0.5 to 1.9 dB.)

No step depends on how rows are cut, so bands of any height give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lowtide.media.video.picture_format import BT_709, LUMA_SHARES, PictureFormat

# Arrays of one band, some ten of them, stay in a core's cache.
_BAND_SAMPLES = 1 << 16
# Kernels of the way back, by the place of a chroma sample between its two rows (or columns), with
# the first tap's place.
_KERNELS = {
    0.0: (-2, (-0.125, 0.25, 0.75, 0.25, -0.125)),
    0.5: (-1, (-0.25, 0.75, 0.75, -0.25)),
    1.0: (-1, (-0.125, 0.25, 0.75, 0.25, -0.125)),
}


class _Codes(NamedTuple):
    """Code values of 0 and the number of codes to 1, of luma (or R, G, B) and of chroma."""

    black: float
    luma: float
    neutral: float
    chroma: float
    largest: float


def rgb_rows(
    planes: Sequence[np.ndarray], format: PictureFormat, first: int, last: int
) -> np.ndarray:
    """Return nonlinear R'G'B' of the rows from ``first`` to before ``last``.

    Args:
        planes: All samples of the picture, as `planes_of` returns them.
        format: How they are stored.
        first: First row.
        last: Row after the last one.

    Returns:
        float32 (N, W, 3), a view of (3, N, W). Black is 0 and white 1; codes outside of the legal
        range and colors outside of RGB's are below 0 or above 1, so that nothing is lost.
    """
    rgb = np.empty((3, last - first, format.width), np.float32)
    for start, end in _bands(first, last, format.width):
        _to_rgb(planes, format, start, end, rgb[:, start - first : end - first])
    return rgb.transpose(1, 2, 0)


class PlaneRows:
    """Stored planes made from rows of R'G'B', in order; the inverse of `rgb_rows`.

    Codes are rounded half up and clipped to those that the bits have.

    Args:
        format: How the planes are stored.
    """

    def __init__(self, format: PictureFormat) -> None:
        self._format, self._next = format, 0
        self._planes = [np.empty(shape, format.plane_dtype) for shape in format.plane_shapes]
        # Chroma rows (2, N, W of chroma) that await the rows below, from row `_kept_from` on.
        self._kept, self._kept_from, self._chroma_next = np.empty(0, np.float32), 0, 0

    def write(self, first: int, rgb: np.ndarray) -> None:
        """Append rows (N, W, 3), float32, of which ``first`` is the next row's number."""
        format, last = self._format, first + len(rgb)
        if first != self._next or last > format.height or rgb.shape[1:] != (format.width, 3):
            raise ValueError(
                f"rows {first} to {last}, {rgb.shape[1:]}, where row {self._next} of"
                f" {format.width}×{format.height} is next"
            )
        channels = rgb.transpose(2, 0, 1)
        for start, end in _bands(first, last, format.width):
            self._write_band(start, channels[:, start - first : end - first])
            self._next = end

    @property
    def planes(self) -> list[np.ndarray]:
        """Planes in `planes_of`'s order, once all rows are written."""
        if self._next != self._format.height:
            raise ValueError(f"{self._next} of {self._format.height} rows were written")
        return self._planes

    def _write_band(self, first: int, rgb: np.ndarray) -> None:
        format, rows = self._format, slice(first, first + rgb.shape[1])
        codes = _codes(format)
        if format.kind == "rgb":
            for plane, channel in zip(self._planes, rgb, strict=True):
                _store(channel * np.float32(codes.luma), codes.black, codes.largest, plane[rows])
            return
        red, blue = _shares(format)
        luma = rgb[0] * np.float32(red)
        luma += rgb[1] * np.float32(1 - red - blue)
        luma += rgb[2] * np.float32(blue)
        if format.kind == "yuv":
            factors = codes.chroma / (2 - 2 * blue), codes.chroma / (2 - 2 * red)
            self._write_chroma(first, luma, (rgb[2], rgb[0]), factors)
        luma *= np.float32(codes.luma)
        _store(luma, codes.black, codes.largest, self._planes[0][rows])

    def _write_chroma(
        self,
        first: int,
        luma: np.ndarray,
        colors: tuple[np.ndarray, np.ndarray],
        factors: tuple[float, float],
    ) -> None:
        """Filter B-Y and R-Y of a band, and store the chroma rows that have all theirs."""
        format = self._format
        across, down = format.chroma_step
        right, below = format.chroma_offset
        chroma = np.empty((2, *luma.shape), np.float32)
        for difference, color, factor in zip(chroma, colors, factors, strict=True):
            np.subtract(color, luma, out=difference)
            difference *= np.float32(factor)
        if across > 1:
            chroma = _halved(chroma, 2, right, 0, format.plane_shapes[1][1], 0, format.width)
        end = first + luma.shape[0]
        if down > 1:
            chroma = self._halved_rows(chroma, first, end, below)
        start, self._chroma_next = self._chroma_next, self._chroma_next + chroma.shape[1]
        codes = _codes(format)
        for plane, samples in zip(self._planes[1:], chroma, strict=True):
            _store(samples, codes.neutral, codes.largest, plane[start : self._chroma_next])

    def _halved_rows(self, chroma: np.ndarray, first: int, end: int, below: float) -> np.ndarray:
        """Return chroma rows, those from `_chroma_next` on that ``chroma``'s rows complete."""
        format = self._format
        if self._kept.size:
            chroma = np.concatenate([self._kept, chroma], 1)
        above, kernel = _KERNELS[below]
        reach = above + len(kernel)  # rows of a chroma sample that begin with its own first one
        done = format.plane_shapes[1][0] if end == format.height else (end - reach) // 2 + 1
        start, done = self._chroma_next, max(done, self._chroma_next)
        halved = _halved(chroma, 1, below, start, done, self._kept_from, format.height)
        # A mirrored border asks for rows further up than the next chroma row does.
        keep = max(self._kept_from, 2 * done + above - 2)
        self._kept = chroma[:, keep - self._kept_from :].copy()
        self._kept_from = keep
        return halved


def _bands(first: int, last: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last rows of bands that stay in a core's cache."""
    high = max(1, _BAND_SAMPLES // width)
    for start in range(first, last, high):
        yield start, min(start + high, last)


def _codes(format: PictureFormat) -> _Codes:
    unit, top = 1 << (format.bits - 8), (1 << format.bits) - 1
    if format.full_range_used:
        return _Codes(0, top, 128 * unit, top, top)
    return _Codes(16 * unit, 219 * unit, 128 * unit, 224 * unit, top)


def _shares(format: PictureFormat) -> tuple[float, float]:
    """Return red's and blue's share of luma; gray needs them only for a model's colors."""
    return LUMA_SHARES.get(format.matrix_used, LUMA_SHARES[BT_709])


def _to_rgb(
    planes: Sequence[np.ndarray], format: PictureFormat, first: int, last: int, out: np.ndarray
) -> None:
    """Write R, G, B of some rows to ``out``, (3, N, W)."""
    codes = _codes(format)
    if format.kind == "rgb":
        for plane, channel in zip(planes, out, strict=True):
            _scaled(plane[first:last], codes.black, codes.luma, channel)
        return
    luma = _scaled(planes[0][first:last], codes.black, codes.luma, np.empty_like(out[0]))
    if format.kind == "gray":
        out[:] = luma
        return
    cb, cr = (_chroma_rows(plane, format, first, last) for plane in planes[1:])
    red, blue = _shares(format)
    green = 1 - red - blue
    cr *= np.float32(2 - 2 * red)
    np.add(luma, cr, out=out[0])
    cb *= np.float32(2 - 2 * blue)
    np.add(luma, cb, out=out[2])
    cr *= np.float32(red / green)
    cb *= np.float32(blue / green)
    cb += cr
    np.subtract(luma, cb, out=out[1])


def _chroma_rows(plane: np.ndarray, format: PictureFormat, first: int, last: int) -> np.ndarray:
    """Return chroma of some rows, (N, W), centered on 0 and to ±0.5, interpolated."""
    across, down = format.chroma_step
    right, below = format.chroma_offset
    codes, (high, _) = _codes(format), plane.shape
    above = int(np.floor((first - below) / down)) if down > 1 else first
    under = int(np.floor((last - 1 - below) / down)) + 2 if down > 1 else last
    stored = plane[np.arange(above, under).clip(0, high - 1)]
    chroma = _scaled(stored, codes.neutral, codes.chroma, np.empty(stored.shape, np.float32))
    if down > 1:
        chroma = _doubled(chroma, 0, below, first, last, above)
    if across > 1:
        edges = chroma[:, :1], chroma, chroma[:, -1:]
        chroma = _doubled(np.concatenate(edges, 1), 1, right, 0, format.width, -1)
    return chroma


def _scaled(codes: np.ndarray, zero: float, count: float, out: np.ndarray) -> np.ndarray:
    np.subtract(codes, np.float32(zero), out=out)
    out *= np.float32(1 / count)
    return out


def _store(values: np.ndarray, zero: float, largest: float, out: np.ndarray) -> None:
    """Round values half up to codes; overwrites them."""
    values += np.float32(zero + 0.5)
    np.clip(values, np.float32(0), np.float32(largest), out=values)
    out[:] = values


def _doubled(
    samples: np.ndarray, axis: int, offset: float, first: int, last: int, origin: int
) -> np.ndarray:
    """Return samples interpolated at the places from ``first`` to before ``last`` of an axis.

    Args:
        samples: Chroma, (rows, columns), with what the border needs.
        axis: The axis to double.
        offset: Place of chroma sample 0.
        first: First place.
        last: Place after the last one.
        origin: Number of the first of ``samples``.
    """
    samples = np.moveaxis(samples, axis, 0)
    shape = list(samples.shape)
    shape[0] = last - first
    out = np.empty(shape, np.float32)
    for phase in range(min(2, last - first)):
        place = (first + phase - offset) / 2
        below = int(np.floor(place))
        share, count = place - below, len(out[phase::2])
        one = samples[below - origin : below - origin + count]
        if share == 0:
            out[phase::2] = one
            continue
        two = samples[below - origin + 1 : below - origin + 1 + count]
        mixed = one * np.float32(1 - share)
        mixed += two * np.float32(share)
        out[phase::2] = mixed
    return np.moveaxis(out, 0, axis)


def _halved(
    samples: np.ndarray, axis: int, offset: float, first: int, last: int, origin: int, length: int
) -> np.ndarray:
    """Return chroma samples from ``first`` to before ``last`` of an axis, filtered.

    Args:
        samples: Full chroma, of which ``origin`` is the first one's number on that axis.
        axis: The axis to halve.
        offset: Place of chroma sample 0.
        first: First chroma sample.
        last: Chroma sample after the last one.
        origin: Number of the first of ``samples``.
        length: Samples of the whole axis, at whose ends they are mirrored.
    """
    above, kernel = _KERNELS[offset]
    places = np.arange(2 * first + above, 2 * (last - 1) + above + len(kernel))
    taken = samples.take(_mirrored(places, offset, length) - origin, axis)
    moved = np.moveaxis(taken, axis, 0)
    count = last - first
    out = moved[0 : 2 * count : 2][:count] * np.float32(kernel[0])
    for tap, weight in enumerate(kernel[1:], 1):
        out += moved[tap : tap + 2 * count : 2][:count] * np.float32(weight)
    return np.moveaxis(out, 0, axis)


def _mirrored(places: np.ndarray, offset: float, length: int) -> np.ndarray:
    """Return places in a picture instead of those outside, so that `_doubled` is undone there.

    A chroma sample that lies on the first or last sample is mirrored about that, others about the
    border.
    """
    at_start = offset == 0
    at_end = offset != 0.5 and (length % 2 == 1) == at_start
    places = np.where(places < 0, -places - (not at_start), places)
    places = np.where(places >= length, 2 * length - 1 - at_end - places, places)
    return places.clip(0, length - 1)
