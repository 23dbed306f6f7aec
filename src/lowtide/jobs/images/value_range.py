"""Range of an image's values, where its sample type does not tell it.

Cameras of microscopes and machines write 10, 12 or 14 bits into 16, and float files hold any unit:
what the type makes white is not white then.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from lowtide.core.errors import ImageError
from lowtide.core.input_file import require_input
from lowtide.media import inspect_image, open_image
from lowtide.media.image_info import ImageInfo, ValueRange
from lowtide.models.denoiser.volume_level import FloatHistogram

_BITS = 8, 10, 12, 14  # of samples in 16 bits
_BAND_SAMPLES = 1 << 17
# Of floats, the share above 1 from which that is not white, and the largest value below which it is
# not either. Then all but a thousandth are below white.
_BEYOND, _DARK = 0.01, 1 / 16
_TAIL = 1e-3
# Where that is so many times what most values reach, as of stars, it would be a sky of which noise
# and structure are nothing: then white is what most reach.
_MOST, _FAR_ABOVE = 0.9, 4
# Noise reaches below black: that is 0 where values are less far below than so much of white.
_FAR_BELOW = 0.5


def find_value_range(path: Path, max_pixels: int, scratch: str | Path | None) -> ValueRange | None:
    """Return the range of an image's values, or None where it is that of its sample type.

    Files of 8 bits are not read, and those of 16 until a value needs all bits.

    Raises:
        ImageError: It cannot be read.
    """
    state = require_input(path, ImageError)
    return _find(path, max_pixels, scratch, state.st_mtime_ns, state.st_size)


def shared_range(
    path: Path, like: Path, max_pixels: int, scratch: str | Path | None
) -> ValueRange | None:
    """Return the range of ``like`` for a file to compare with it, its own for other samples."""
    types = {inspect_image(one, max_pixels=max_pixels).info.sample_type for one in (path, like)}
    return find_value_range(like if len(types) == 1 else path, max_pixels, scratch)


@lru_cache(maxsize=64)
def _find(
    path: Path, max_pixels: int, scratch: str | Path | None, _changed: int, _bytes: int
) -> ValueRange | None:
    facts = inspect_image(path, max_pixels=max_pixels)
    if facts.info.sample_type == "uint8" or facts.spans_type:
        return None
    with open_image(path, max_pixels=max_pixels, scratch_dir=scratch) as source:
        height, width, channels = source.shape
        step = max(1, _BAND_SAMPLES // (width * channels))
        bands = (source.read(first, first + step) for first in range(0, height, step))
        if facts.info.sample_type == "uint16":
            return _range_of_integers(bands)
        return _range_of_floats(rows[..., : facts.info.color_channels] for rows in bands)


def _range_of_integers(bands: Iterator[np.ndarray]) -> ValueRange | None:
    most = 0
    for rows in bands:
        most = max(most, int(rows.max()))
        if most >= 1 << _BITS[-1]:
            return None
    bits = next(bits for bits in _BITS if most < 1 << bits)
    return ValueRange(0, (1 << bits) - 1, 0, most) if most else None


def _range_of_floats(bands: Iterator[np.ndarray]) -> ValueRange | None:
    histogram, least, most, total, count = FloatHistogram(), np.inf, -np.inf, 0.0, 0
    beyond = not_finite = 0
    for rows in bands:
        values = rows[np.isfinite(rows)]
        not_finite += rows.size - values.size
        if values.size:
            histogram.add(values)
            least, most = min(least, float(values.min())), max(most, float(values.max()))
            total += float(values.sum(dtype=np.float64))
            beyond += int((values > 1).sum())
            count += values.size
    if not count:
        return ValueRange(0, 1, 0, 1, 0.0, not_finite) if not_finite else None
    if least >= 0 and (_DARK < most <= 1 or most == 0) and not not_finite:
        return None
    low, white = 0.0, 1.0
    if beyond / count > _BEYOND or most <= _DARK:
        nearly_all, white = histogram.quantile(_MOST), histogram.quantile(1 - _TAIL)
        if white > _FAR_ABOVE * nearly_all > 0:
            white = nearly_all
    if (lowest := histogram.quantile(_TAIL)) < -_FAR_BELOW * white:
        low = lowest
    if white <= low:
        low, white = least, max(most, least + 1)
    return ValueRange(low, white, least, most, total / count, not_finite)


def range_notes(info: ImageInfo) -> list[str]:
    """Return what a user has to know of the range of an image's values."""
    known = info.value_range
    if known is None:
        return []
    if info.sample_type == "uint16":
        bits = int(known.white).bit_length()
        return [
            f"16-bit samples reach {known.most:,g}: white is taken as {known.white:,g}, that of"
            f" {bits} bits, and the result written so; levels of 255 are of that white"
        ]
    notes = []
    if (known.low, known.white) != (0, 1):
        notes.append(
            f"float samples reach from {known.least:.4g} to {known.most:.4g}: {known.low:.4g} is"
            f" taken as black and {known.white:.4g} as white, and what is beyond is kept; levels of"
            " 255 are of that range"
        )
    elif known.least < 0 or known.most > 1:
        notes.append(
            f"float samples reach from {known.least:.4g} to {known.most:.4g}: 1 is taken as white,"
            " and what is beyond 0..1 is kept"
        )
    if known.not_finite:
        notes.append(f"{known.not_finite:,} samples are NaN or infinite, and are kept")
    return notes


class ValueRangeScale:
    """Conversion of float color of a `ValueRange`, which keeps what is beyond.

    Denoisers take black to white as 0..1, in proportion, so that noise stays what it is. Others
    take all values into 0..1, and what is far beyond black and white by its logarithm: a network
    errs by a share of 0..1, which is little of the brightest star and all of the sky around it.
    """

    def __init__(self, known: ValueRange) -> None:
        self._known, self._span = known, known.white - known.low
        self._above = max(self._linear(known.most) - 1, 0.0)
        self._below = max(-self._linear(known.least), 0.0)
        # Each side has as much of 0..1 as in proportion, at most as much as black to white.
        above, below = min(self._above, 1.0), min(self._below, 1.0)
        self._start = below / (1 + above + below)
        self._end = 1 - above / (1 + above + below)

    @property
    def share(self) -> float:
        """What black to white is of 0..1 in `compressed`."""
        return self._end - self._start

    def _linear(self, value: float) -> float:
        return (value - self._known.low) / self._span

    def to_unit(self, samples: np.ndarray) -> np.ndarray:
        """Return float32 samples, 0 at black and 1 at white; the mean where they are not finite."""
        known = np.where(np.isfinite(samples), samples, np.float32(self._known.mean))
        return ((known - self._known.low) / self._span).astype(np.float32)

    def from_unit(self, unit: np.ndarray) -> np.ndarray:
        """Return samples, float32, of what `to_unit` returned."""
        return (unit * np.float64(self._span) + self._known.low).astype(np.float32)

    def compressed(self, unit: np.ndarray) -> np.ndarray:
        """Return what `to_unit` returned in 0..1, whatever its range."""
        made = self._start + (self._end - self._start) * unit.clip(0, 1)
        for sign, _, share, most in self._sides():
            excess = (sign * unit - max(sign, 0)).clip(0, most)
            made += sign * share / np.log1p(most) * np.log1p(excess)
        return made.astype(np.float32)

    def expanded(self, made: np.ndarray) -> np.ndarray:
        """Return the inverse of `compressed`."""
        unit = ((made - self._start) / (self._end - self._start)).clip(0, 1).astype(np.float64)
        for sign, edge, share, most in self._sides():
            beyond = (sign * (made - edge)).clip(0, share).astype(np.float64)
            unit += sign * np.expm1(beyond / share * np.log1p(most))
        return unit.astype(np.float32)

    def _sides(self) -> list[tuple[int, float, float, float]]:
        """Return sign, edge and share in 0..1, and the most excess of what is beyond an end."""
        sides = [
            (1, self._end, 1 - self._end, self._above),
            (-1, self._start, self._start, self._below),
        ]
        return [one for one in sides if one[-1]]
