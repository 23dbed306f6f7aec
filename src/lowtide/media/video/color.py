"""Conversion of stored planes to R'G'B' and back, by rows, in float32 and by ITU-T H.273.

Chroma is interpolated linearly at the place that its location says. The way back filters it by the
short filter whose samples, interpolated again, are the same: an identity gives back the very codes
of all planes, and no round of reading and writing blurs or shifts colors. On photographs, that
chroma is also nearer to the picture than chroma that was averaged.

No step depends on how rows are cut, so bands of any height give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lowtide.media.video.picture_format import BT_709, LUMA_SHARES, PictureFormat

# Arrays of one band, some ten of them, stay in a core's cache.
_BAND_SAMPLES = 1 << 17

# Filters of the way back, by the place of a chroma sample between its two rows (or columns): the
# first tap's place from there, and the weights.
FILTERS = {
    0.0: (-2, (-0.125, 0.25, 0.75, 0.25, -0.125)),
    0.5: (-1, (-0.25, 0.75, 0.75, -0.25)),
    1.0: (-1, (-0.125, 0.25, 0.75, 0.25, -0.125)),
}
BORDER = 2  # mirrored columns on each side, as many as filters reach


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


class PlaneBuilder:
    """Stored planes made from rows of R'G'B', in order; the inverse of `rgb_rows`.

    Codes are rounded half up and clipped to those that the bits have.

    Args:
        format: How the planes are stored.
    """

    def __init__(self, format: PictureFormat) -> None:
        self._format, self._next = format, 0
        self._planes = [np.empty(shape, format.plane_dtype) for shape in format.plane_shapes]
        # B-Y and R-Y of rows from `_kept_from` on, (2, N, W of chroma), that await rows below.
        self._kept: np.ndarray | None = None
        self._kept_from, self._chroma_next = 0, 0

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
        format, codes = self._format, _codes(self._format)
        rows, rgb = slice(first, first + rgb.shape[1]), np.ascontiguousarray(rgb)
        if format.kind == "rgb":
            for plane, channel in zip(self._planes, rgb, strict=True):
                _store(channel * np.float32(codes.luma), codes.black, codes, plane[rows])
            return
        red, blue = _shares(format)
        luma = rgb[0] * np.float32(red)
        luma += rgb[1] * np.float32(1 - red - blue)
        luma += rgb[2] * np.float32(blue)
        if format.kind == "yuv":
            self._write_chroma(first, self._differences(luma, rgb))
        luma *= np.float32(codes.luma)
        _store(luma, codes.black, codes, self._planes[0][rows])

    def _differences(self, luma: np.ndarray, rgb: np.ndarray) -> np.ndarray:
        """Return B-Y and R-Y, (2, N, W), of every column or filtered to those of chroma."""
        format = self._format
        across, right = format.chroma_step[0], format.chroma_offset[0]
        border = BORDER if across > 1 else 0
        wide = np.empty((2, len(luma), format.width + 2 * border), np.float32)
        for channel, difference in zip((2, 0), wide, strict=True):
            np.subtract(rgb[channel], luma, out=difference[:, border : border + format.width])
        if across == 1:
            return wide
        outside = np.array([-2, -1, format.width, format.width + 1])
        inside = mirror_places(outside, right, format.width)
        wide[..., outside + border] = wide[..., inside + border]
        first_tap = BORDER + FILTERS[right][0]
        return downsample_by_two(wide[..., first_tap:], 2, right, format.plane_shapes[1][1])

    def _write_chroma(self, first: int, chroma: np.ndarray) -> None:
        """Store the chroma rows that these rows (2, N, W), from ``first`` on, complete."""
        format, codes = self._format, _codes(self._format)
        if format.chroma_step[1] > 1:
            chroma = self._halved_rows(chroma, first + chroma.shape[1])
        start, self._chroma_next = self._chroma_next, self._chroma_next + chroma.shape[1]
        for plane, samples, share in zip(
            self._planes[1:], chroma, reversed(_shares(format)), strict=True
        ):
            samples *= np.float32(codes.chroma / (2 - 2 * share))
            _store(samples, codes.neutral, codes, plane[start : self._chroma_next])

    def _halved_rows(self, chroma: np.ndarray, end: int) -> np.ndarray:
        """Return chroma rows from `_chroma_next` on, of ``chroma``'s and earlier rows."""
        format = self._format
        below = format.chroma_offset[1]
        if self._kept is not None:
            chroma = np.concatenate([self._kept, chroma], 1)
        above, weights = FILTERS[below]
        # A chroma row is complete with the last row of its filter, at the end with what is there.
        done = (end - above - len(weights)) // 2 + 1
        done = format.plane_shapes[1][0] if end == format.height else max(done, self._chroma_next)
        if done == self._chroma_next:
            self._kept = chroma
            return chroma[:, :0]
        places = np.arange(2 * self._chroma_next + above, 2 * (done - 1) + above + len(weights))
        places = mirror_places(places, below, format.height) - self._kept_from
        made = downsample_by_two(chroma.take(places, 1), 1, below, done - self._chroma_next)
        # A mirrored border asks for rows further up than the next chroma row does.
        keep = max(self._kept_from, 2 * done + above - 2)
        self._kept = chroma[:, keep - self._kept_from :].copy()
        self._kept_from = keep
        return made


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
    red, blue = _shares(format)
    above_blue = _chroma_rows(planes[1], format, first, last, 2 - 2 * blue)  # B-Y
    above_red = _chroma_rows(planes[2], format, first, last, 2 - 2 * red)
    np.add(luma, above_red, out=out[0])
    np.add(luma, above_blue, out=out[2])
    above_red *= np.float32(red / (1 - red - blue))
    above_blue *= np.float32(blue / (1 - red - blue))
    luma -= above_red
    np.subtract(luma, above_blue, out=out[1])


def _chroma_rows(
    plane: np.ndarray, format: PictureFormat, first: int, last: int, factor: float
) -> np.ndarray:
    """Return chroma of some rows, (N, W), 0 for neutral, interpolated and times ``factor``."""
    across, down = format.chroma_step
    right, below = format.chroma_offset
    codes, (high, wide) = _codes(format), plane.shape
    above = (2 * first - int(2 * below)) // 4 if down > 1 else first  # floors, and exactly
    under = (2 * last - 2 - int(2 * below)) // 4 + 2 if down > 1 else last
    rows = plane[np.arange(above, under).clip(0, high - 1)]
    chroma = np.empty((len(rows), wide + 2), np.float32)
    _scaled(rows, codes.neutral, codes.chroma / factor, chroma[:, 1:-1])
    chroma[:, 0], chroma[:, -1] = chroma[:, 1], chroma[:, -2]
    if down > 1:
        chroma = upsample_by_two(chroma, 0, first - below - 2 * above, last - first)
    return upsample_by_two(chroma, 1, 2 - right, format.width) if across > 1 else chroma[:, 1:-1]


def _scaled(codes: np.ndarray, zero: float, count: float, out: np.ndarray) -> np.ndarray:
    np.subtract(codes, np.float32(zero), out=out)
    out *= np.float32(1 / count)
    return out


def _store(values: np.ndarray, zero: float, codes: _Codes, out: np.ndarray) -> None:
    """Round values half up to codes; overwrites them."""
    values += np.float32(zero + 0.5)
    np.clip(values, np.float32(0), np.float32(codes.largest), out=values)
    out[:] = values


def upsample_by_two(samples: np.ndarray, axis: int, start: float, count: int) -> np.ndarray:
    """Return samples (rows, columns), of which each counts for two, interpolated on an axis.

    Args:
        samples: Samples that lie 2 apart.
        axis: The axis.
        start: Place of the first result, where the first sample is at 0.
        count: Number of results, 1 apart.
    """
    samples = np.moveaxis(samples, axis, 0)
    out = np.empty(
        (count, samples.shape[1]) if axis == 0 else (samples.shape[1], count), np.float32
    )
    results, weighted = np.moveaxis(out, axis, 0), {}
    for phase in range(2):
        below, share = divmod((start + phase) / 2, 1)
        below, half = int(below), results[phase::2]
        for one in (share, 1 - share):
            if one not in weighted:
                weighted[one] = samples * np.float32(one)
        after = below + len(half)
        if share == 0:
            half[:] = samples[below:after]
        else:
            upper, lower = weighted[1 - share], weighted[share]
            np.add(upper[below:after], lower[below + 1 : after + 1], out=half)
    return out


def downsample_by_two(samples: np.ndarray, axis: int, offset: float, count: int) -> np.ndarray:
    """Return ``count`` samples filtered on an axis; ``samples`` begin with the first one's taps."""

    def tap(place: int) -> np.ndarray:
        cut = [slice(None)] * samples.ndim
        cut[axis] = slice(place, place + 2 * count - 1, 2)
        return samples[tuple(cut)]

    _, weights = FILTERS[offset]
    size = len(weights)
    out = tap(0) + tap(size - 1)
    out *= np.float32(weights[0])
    for place in range(1, size // 2):
        pair = tap(place) + tap(size - 1 - place)
        pair *= np.float32(weights[place])
        out += pair
    if size % 2:
        out += tap(size // 2) * np.float32(weights[size // 2])
    return out


def mirror_places(places: np.ndarray, offset: float, length: int) -> np.ndarray:
    """Return places in a picture for those outside, so that `upsample_by_two` is undone there.

    A chroma sample that lies on the first or last sample is mirrored about that, others about the
    border.
    """
    at_start = offset == 0
    at_end = offset != 0.5 and (length % 2 == 1) == at_start
    places = np.where(places < 0, -places - (not at_start), places)
    places = np.where(places >= length, 2 * length - 1 - at_end - places, places)
    return places.clip(0, length - 1)
