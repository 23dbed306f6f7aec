"""Conversion between image channels (gray, RGB, alpha) and network channels.

A network has one or three channels; an image has gray or RGB and possibly alpha. Gray runs through
a color network as three equal channels, RGB through a gray network channel by channel. Color is
premultiplied by alpha before the network and divided by it after, so that hidden colors of
transparent pixels cannot bleed into the edge; alpha runs through the same network.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.errors import ModelError

# Below half an 8-bit step a pixel is invisible, and its color is noise divided by noise.
_INVISIBLE = 0.5 / 255
_NOISE = 0.02


class ChannelPlan:
    """Mapping of one kind of image to the inputs of one network.

    One tile becomes ``inputs_per_tile`` network inputs, the last of them for alpha if there is one.
    Raises `ModelError` for a network whose channels cannot carry an image.
    """

    def __init__(self, image_channels: int, in_channels: int, out_channels: int) -> None:
        if in_channels != out_channels or in_channels not in (1, 3):
            raise ModelError(
                f"the model maps {in_channels} channels to {out_channels};"
                " images need 1 to 1 or 3 to 3",
                hint="choose another model; `lowtide models` lists the bundled ones",
            )
        self.alpha = image_channels in (2, 4)
        self.color_channels = image_channels - self.alpha
        self.network_channels = in_channels
        self.color_inputs = 3 if (self.color_channels, in_channels) == (3, 1) else 1
        self.inputs_per_tile = self.color_inputs + self.alpha

    def to_network(self, tiles: Tensor) -> Tensor:
        """Convert (B, C, H, W) in 0..1 to network inputs (B·images, channels, H, W).

        Inputs for alpha come last.
        """
        color = tiles[:, : self.color_channels]
        if not self.alpha:
            return self._color_to_inputs(color)
        opacity = tiles[:, -1:]
        return torch.cat([self._color_to_inputs(color * opacity), self._expand_channels(opacity)])

    def from_network(self, output: Tensor, tiles: Tensor) -> Tensor:
        """Convert the network's output to (B, C, H·s, W·s) in 0..1.

        ``tiles`` are the images given to `to_network`, s is the scale.
        """
        count = len(tiles) * self.color_inputs
        if not self.alpha:
            return self._color_from_outputs(output.clamp_(0, 1), len(tiles))
        color = self._color_from_outputs(output[:count], len(tiles))
        raw = output[count:].mean(1, keepdim=True)
        # Color and alpha ring alike at an edge, and the ringing cancels only if unclamped.
        visible = raw > _INVISIBLE
        color = torch.where(visible, color / _divisor(raw).clamp_min(_INVISIBLE), 0)
        opacity = _restore_flat_alpha(tiles[:, -1:], raw.clamp(0, 1))
        return torch.cat([color.clamp_(0, 1), opacity], 1)

    def _color_to_inputs(self, color: Tensor) -> Tensor:
        if self.color_inputs == 3:
            return color.reshape(-1, 1, *color.shape[2:])
        return self._expand_channels(color)

    def _expand_channels(self, image: Tensor) -> Tensor:
        return (
            image
            if image.shape[1] == self.network_channels
            else image.expand(-1, self.network_channels, -1, -1)
        )

    def _color_from_outputs(self, color: Tensor, count: int) -> Tensor:
        if self.color_inputs == 3:
            return color.reshape(count, 3, *color.shape[2:])
        return color if color.shape[1] == self.color_channels else color.mean(1, keepdim=True)


def _divisor(raw: Tensor) -> Tensor:
    """Return the network's alpha, with values that differ from 1 by noise set to 1.

    No network returns a white area as exactly 1; dividing by its error would tint opaque areas.
    Real ringing is larger and stays.
    """
    error = raw - 1
    certain = ((error.abs() - _NOISE) / _NOISE).clamp_(0, 1)
    return 1 + error * certain


def _restore_flat_alpha(before: Tensor, after: Tensor) -> Tensor:
    """Copy the input's alpha to the output where its 3×3 neighborhood is constant.

    Networks ring by a level or two; an opaque image must stay opaque. The rule looks one pixel far,
    so it is the same for every tiling.
    """
    high = F.max_pool2d(before, 3, 1, 1)
    low = -F.max_pool2d(-before, 3, 1, 1)
    scale = after.shape[-1] // before.shape[-1]
    flat = (high == low).to(after.dtype)
    flat, value = (
        t.repeat_interleave(scale, 2).repeat_interleave(scale, 3) for t in (flat, before)
    )
    return torch.where(flat > 0, value, after)
