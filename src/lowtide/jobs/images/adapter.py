"""Conversion between image samples (gray, RGB, alpha, 8 or 16 bits) and network values.

A network has one or three channels; an image has gray or RGB and possibly alpha. Gray runs through
a color network as three equal channels, RGB through a gray network channel by channel. Color is
premultiplied by alpha before the network and divided by it after, so that hidden colors of
transparent pixels cannot bleed into the edge; alpha runs through the same network.
"""

from __future__ import annotations

import numpy as np

from lowtide.core.errors import ModelError
from lowtide.jobs.images.value_range import ValueRangeScale
from lowtide.media.image_info import ImageInfo
from lowtide.models.denoiser.config import NOISY_RANGE

# Below half an 8-bit step a pixel is invisible, and its color is noise divided by noise.
_INVISIBLE = 0.5 / 255
_NOISE = 0.02
_AREA = 3  # pixels on a side of an area in which noise would show


def require_image_channels(in_channels: int, out_channels: int) -> None:
    """Raise `ModelError` for a network whose channels cannot carry an image."""
    if in_channels != out_channels or in_channels not in (1, 3):
        raise ModelError(
            f"the model maps {in_channels} channels to {out_channels};"
            " images need 1 to 1 or 3 to 3",
            hint="choose another model; `lowtide models` lists the bundled ones",
        )


class ImageAdapter:
    """`lowtide.core.signal.ValueAdapter` of one kind of image and networks of so many channels.

    One image becomes ``inputs`` network inputs, the last of them for alpha if there is one.
    Results are images of the same kind.
    """

    def __init__(self, info: ImageInfo, network_channels: int) -> None:
        self._alpha, self.color_channels = info.alpha, info.color_channels
        self._network_channels = network_channels
        self._color_inputs = 3 if (info.color_channels, network_channels) == (3, 1) else 1
        self._full_scale = info.full_scale
        self.inputs = self._color_inputs + info.alpha
        known = info.value_range if info.sample_type == "float32" else None
        self._floats = None if known is None else ValueRangeScale(known)
        self._has_gaps = known is not None and known.not_finite > 0
        self.context = 1 if info.alpha else 0 if self._has_gaps else None
        self.channels = info.channels
        self.dtype = np.dtype(info.sample_type)

    @property
    def unit_share(self) -> float:
        """What a change from black to white is in a network's values."""
        return 1.0 if self._floats is None else self._floats.share

    def to_network(self, values: np.ndarray) -> np.ndarray:
        """Convert samples (B, H, W, C) to inputs (B·inputs, channels, H, W) in 0..1.

        Inputs for alpha come last.
        """
        color = self._color_to_unit(values)
        if not self._alpha:
            return self.color_to_inputs(color)
        opacity = self._opacity(values)
        return np.concatenate(
            [self.color_to_inputs(color * opacity), self._repeat_channels(opacity)]
        )

    def from_network(self, results: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Convert a network's results to (B, H·s, W·s, C) in 0..1, s the scale.

        ``values`` are the samples given to `to_network`, of which only alpha is read.
        """
        if not self._alpha:
            color = self.color_from_outputs(np.clip(results, 0, 1, out=results))
            return self._with_gaps(np.moveaxis(color, 1, -1), values)
        assert values is not None
        count = len(values) * self._color_inputs
        color = self.color_from_outputs(results[:count])
        raw = results[count:].mean(1, keepdims=True)
        # Color and alpha ring alike at an edge, and the ringing cancels only if unclamped.
        color = np.where(raw > _INVISIBLE, color / np.maximum(_divisor(raw), _INVISIBLE), 0)
        opacity = _restore_flat_alpha(self._opacity(values), raw.clip(0, 1))
        made = np.moveaxis(np.concatenate([color.clip(0, 1), opacity], 1), 1, -1)
        return self._with_gaps(made, values)

    def _with_gaps(self, made: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Return results (B, H·s, W·s, C) with what is not finite in samples (B, H, W, C)."""
        if not self._has_gaps or values is None:
            return made
        scale = made.shape[1] // values.shape[1]
        before = values.repeat(scale, 1).repeat(scale, 2)
        return np.where(np.isfinite(before), made, before)

    def to_sink(self, floats: np.ndarray) -> np.ndarray:
        """Convert (..., C) to samples, clamped to 0..1 and rounded to their type.

        Floats with a range of their own are not clamped.
        """
        if self._floats is not None:
            color, alpha = np.split(floats, [self.color_channels], -1)
            made = np.where(np.isfinite(color), self._color_from_unit(color), color)
            return np.concatenate([made, alpha], -1)
        unit = floats.clip(0, 1)
        if self._full_scale == 1:
            return unit
        unit *= self._full_scale
        return np.rint(unit, out=unit).astype(self.dtype)

    def _color_to_unit(self, values: np.ndarray) -> np.ndarray:
        """Convert the color of samples (B, H, W, C) to float32 (B, C', H, W) in 0..1."""
        channels = np.moveaxis(values[..., : self.color_channels], -1, 1)
        if self._floats is not None:
            return np.ascontiguousarray(self._floats.compressed(self._floats.to_unit(channels)))
        return self._to_unit(channels)

    def _color_from_unit(self, color: np.ndarray) -> np.ndarray:
        """Return float samples of color (..., C')."""
        assert self._floats is not None
        return self._floats.from_unit(self._floats.expanded(color))

    def _opacity(self, values: np.ndarray) -> np.ndarray:
        """Return the alpha of samples (B, H, W, C), float32 (B, 1, H, W) in 0..1."""
        return self._to_unit(np.moveaxis(values[..., -1:], -1, 1))

    def _to_unit(self, channels: np.ndarray) -> np.ndarray:
        if self._full_scale == 1:
            # A float image may hold any value; networks expect 0..1.
            return np.nan_to_num(np.array(channels, order="C").clip(0, 1), copy=False)
        return np.multiply(channels, np.float32(1 / self._full_scale), dtype=np.float32, order="C")

    def color_to_inputs(self, color: np.ndarray) -> np.ndarray:
        """Convert color (B, C', H, W) to inputs (B·inputs, channels, H, W)."""
        if self._color_inputs == 3:
            return color.reshape(-1, 1, *color.shape[2:])
        return self._repeat_channels(color)

    def _repeat_channels(self, image: np.ndarray) -> np.ndarray:
        same = image.shape[1] == self._network_channels
        return image if same else image.repeat(self._network_channels, axis=1)

    def color_from_outputs(self, color: np.ndarray) -> np.ndarray:
        """Convert a network's results (B·inputs, channels, H, W) to color (B, C', H, W)."""
        if self._color_inputs == 3:
            return color.reshape(-1, 3, *color.shape[2:])
        same = color.shape[1] == self.color_channels
        return color if same else color.mean(1, keepdims=True)


class NoisyImageAdapter(ImageAdapter):
    """`ImageAdapter` for denoisers: color as it is, since alpha would change its noise.

    Alpha has no noise and is copied, as are areas that are black or white as a whole: noise would
    show in them, and next to the bars of a film the network would carry its own into them.
    """

    def __init__(self, info: ImageInfo, network_channels: int) -> None:
        super().__init__(info, network_channels)
        self.inputs = self._color_inputs
        if self._full_scale != 1:
            self.context = _AREA - 1
        else:
            self.context = 0 if self._alpha or self._floats is not None else None

    def to_network(self, values: np.ndarray) -> np.ndarray:
        """Convert samples (B, H, W, C) to inputs (B·inputs, channels, H, W) in 0..1."""
        return self.color_to_inputs(self._color_to_unit(values))

    def from_network(self, results: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Convert a network's results to (B, H, W, C) in 0..1, alpha that of ``values``."""
        color = np.moveaxis(self.color_from_outputs(results), 1, -1)
        made = self._with_rest(color, values)
        if not self._alpha or values is None:
            return made
        return np.concatenate([made, np.moveaxis(self._opacity(values), 1, -1)], -1)

    def _with_rest(self, color: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Return color (..., C') with what the network was not given of samples (..., C).

        Of floats with a range of their own that is what is far beyond black and white, or not
        finite. Other color is clamped to 0..1, and areas of integers at one of both are kept.
        """
        if values is None or (self._floats is None and self._full_scale == 1):
            return color.clip(0, 1)
        before = values[..., : self.color_channels]
        if self._floats is None:
            kept = _in_limit_areas(before, self._full_scale)[..., None]
            return np.where(kept, before > 0, color.clip(0, 1))
        unit = self._floats.to_unit(before)
        return np.where(np.isfinite(before), color + (unit - unit.clip(*NOISY_RANGE)), before)

    def _color_to_unit(self, values: np.ndarray) -> np.ndarray:
        """Convert the color of samples (B, H, W, C) to float32 (B, C', H, W) in 0..1.

        Floats are in -1..2: they hold noise below 0 and above 1, and clipped noise is not what it
        was.
        """
        if self._full_scale != 1:
            return super()._color_to_unit(values)
        channels = np.moveaxis(values[..., : self.color_channels], -1, 1)
        if self._floats is not None:
            channels = self._floats.to_unit(channels)
        return np.nan_to_num(np.array(channels, order="C").clip(*NOISY_RANGE), copy=False)

    def _color_from_unit(self, color: np.ndarray) -> np.ndarray:
        """Return float samples of color (..., C'), in proportion."""
        assert self._floats is not None
        return self._floats.from_unit(color)

    def color(self, values: np.ndarray) -> np.ndarray:
        """Return the color (H, W, C') in 0..1 of samples (H, W, C)."""
        return np.moveaxis(self._color_to_unit(values[None])[0], 0, -1)

    def visible_color(self, values: np.ndarray) -> np.ndarray:
        """Return the color (H, W, C') in 0..1 of samples (H, W, C); 0 where it is hidden."""
        color = self.color(values)
        if not self._alpha:
            return color
        return color * (values[..., -1:] > _INVISIBLE * self._full_scale)

    def to_samples(self, color: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return samples (H, W, C) of color (H, W, C'), with the alpha of samples ``values``."""
        made = self.to_sink(self._with_rest(color, values))
        return np.concatenate([made, values[..., -1:]], -1) if self._alpha else made


def _in_limit_areas(color: np.ndarray, white: float) -> np.ndarray:
    """Return whether pixels of color (..., H, W, C) are in areas of 3 × 3 that are black, or white.

    What is beyond the image counts as either.
    """
    found = np.zeros(color.shape[:-1], bool)
    for limit in (0, white):
        other = _near((color != limit).any(-1))
        found |= _near(~other)
    return found


def _near(marked: np.ndarray) -> np.ndarray:
    """Return which pixels (..., H, W) are marked, or next to one that is."""
    for axis in (-2, -1):
        found = marked.copy()
        before, after = np.moveaxis(marked, axis, 0), np.moveaxis(found, axis, 0)
        after[1:] |= before[:-1]
        after[:-1] |= before[1:]
        marked = found
    return marked


def _divisor(raw: np.ndarray) -> np.ndarray:
    """Return the network's alpha, with values that differ from 1 by noise set to 1.

    No network returns a white area as exactly 1; dividing by its error would tint opaque areas.
    Real ringing is larger and stays.
    """
    error = raw - 1
    certain = ((abs(error) - _NOISE) / _NOISE).clip(0, 1)
    return 1 + error * certain


def _restore_flat_alpha(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Copy the input's alpha to the output where its 3×3 neighborhood is constant.

    Networks ring by a level or two; an opaque image must stay opaque. The rule looks one pixel far,
    so it is the same for every tiling.
    """
    height, width = before.shape[2:]
    padded = np.pad(before, ((0, 0), (0, 0), (1, 1), (1, 1)), "edge")
    flat = np.ones(before.shape, bool)
    for top in range(3):
        for left in range(3):
            flat &= padded[:, :, top : top + height, left : left + width] == before
    # Each pixel is a block of scale × scale of the output.
    blocks = after.reshape(-1, 1, height, after.shape[2] // height, width, after.shape[3] // width)
    flat, before = (one[:, :, :, None, :, None] for one in (flat, before))
    return np.where(flat, before, blocks).reshape(after.shape)
