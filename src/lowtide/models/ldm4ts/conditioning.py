"""Features of the look-back that LDM4TS is conditioned on, images of it among them.

The images are folded by the period, a Gramian angular field, and a recurrence plot. Their functions
take series [B, L, D] and return [B, D, h, w], all windows and variables at once. A side shorter
than the series is made from piecewise means first, so that nothing of L × L values is ever there:
a view takes at most three times the 4·B·D·h·w bytes of its result (float32).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.ldm4ts.config import LDM4TSConfig
from lowtide.models.ldm4ts.unet import AttentionChoice, TransformerLayer, group_norm

# Lowest frequencies of the spectrum, and most tokens and layers of the temporal branch.
_FREQUENCIES, _TOKENS, _LAYERS = 64, 32, 2
# Pixels of the look-back's images, along each side, to a pixel of the latent.
_PIXELS = 4
_LEAST_DEVIATION = 1e-6


class LookBackEncoder(nn.Module):
    """Features of a look-back: a map as large as the latent, and a vector.

    Each variable is normalized by the mean and deviation of the window; the logarithm of the
    deviation is a feature. Branches that the configuration switches off are left out.

    Args:
        config: Sizes and branches.
        latent_size: Height and width of the latent.
        choice: Attention backend.

    Attributes:
        map_channels: Channels of the map, M; 0 without views.
        vector_size: Size of the vector, V.
    """

    def __init__(
        self, config: LDM4TSConfig, latent_size: tuple[int, int], choice: AttentionChoice
    ) -> None:
        super().__init__()
        self.vector_size = vector = 4 * config.width
        self.map_channels = config.width if config.views else 0
        self._latent_size = latent_size
        self.views = ViewEncoder(config, latent_size, vector) if config.views else None
        self.frequency = SpectrumEncoder(config, vector) if config.frequency else None
        self.temporal = TemporalEncoder(config, vector, choice) if config.temporal else None
        branches = config.views + config.frequency + config.temporal
        self.gates = nn.Linear(branches * vector, branches) if branches else None
        self.deviation = nn.Linear(config.variables, vector)

    def forward(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Map look-backs (B, L, D) to a map (B, M, h, w) and a vector (B, V)."""
        deviation = context.std(dim=1, correction=0).clamp_min(_LEAST_DEVIATION)
        series = (context - context.mean(dim=1, keepdim=True)) / deviation[:, None]
        image = context.new_zeros(len(context), 0, *self._latent_size)
        found = []
        if self.views is not None:
            image, pooled = self.views(series)
            found.append(pooled)
        found += [branch(series) for branch in (self.frequency, self.temporal) if branch]
        vector = self.deviation(deviation.log())
        if self.gates is not None:
            gates = self.gates(torch.cat(found, dim=1)).sigmoid()
            vector = vector + (torch.stack(found, dim=1) * gates[:, :, None]).sum(dim=1)
        return image, vector


class ViewEncoder(nn.Module):
    """Encoder of the look-back's images: a map (B, M, h, w), and its mean as a vector (B, V)."""

    def __init__(self, config: LDM4TSConfig, latent_size: tuple[int, int], vector: int) -> None:
        super().__init__()
        width, (height, spread) = config.width, latent_size
        self._period, self._size = config.period, (_PIXELS * height, _PIXELS * spread)
        self.patches = nn.Conv2d(3 * config.variables, width, _PIXELS, stride=_PIXELS)
        self.mix = nn.Sequential(
            group_norm(width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)
        )
        self.out = nn.Linear(width, vector)

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        """Map a normalized look-back (B, L, D) to a map and a vector."""
        image = self.patches(view_images(series, self._period, self._size))
        image = image + self.mix(image)
        return image, self.out(image.mean(dim=(2, 3)))


class SpectrumEncoder(nn.Module):
    """Encoder of the lowest frequencies: real and imaginary part, and log amplitude."""

    def __init__(self, config: LDM4TSConfig, vector: int) -> None:
        super().__init__()
        self._count = min(_FREQUENCIES, config.look_back // 2)
        self.layers = nn.Sequential(
            nn.Linear(3 * self._count * config.variables, vector),
            nn.SiLU(),
            nn.Linear(vector, vector),
        )

    def forward(self, series: Tensor) -> Tensor:
        """Map a normalized look-back (B, L, D) to a vector (B, V)."""
        # In fp32, because there is no FFT of bfloat16.
        bins = torch.fft.rfft(series.float(), dim=1, norm="ortho")[:, 1 : self._count + 1]
        parts = [bins.real, bins.imag, bins.abs().add(_LEAST_DEVIATION).log()]
        return self.layers(torch.cat(parts, dim=1).flatten(1).to(series.dtype))


class TemporalEncoder(nn.Module):
    """Transformer of patches of the raw series, all variables of a patch in one token."""

    def __init__(self, config: LDM4TSConfig, vector: int, choice: AttentionChoice) -> None:
        super().__init__()
        width = 2 * config.width
        period = min(config.period, config.look_back)
        self._patch = max(period, -(-config.look_back // _TOKENS))
        tokens = -(-config.look_back // self._patch)
        self._missing = tokens * self._patch - config.look_back
        self.embed = nn.Linear(self._patch * config.variables, width)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.layers = nn.ModuleList(TransformerLayer(width, choice) for _ in range(_LAYERS))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(2 * width, vector)

    def forward(self, series: Tensor) -> Tensor:
        """Map a normalized look-back (B, L, D) to a vector (B, V)."""
        # The oldest patch is filled with the first value.
        series = F.pad(series.transpose(1, 2), (self._missing, 0), mode="replicate")
        tokens = self.embed(series.unflatten(2, (-1, self._patch)).transpose(1, 2).flatten(2))
        tokens = tokens + self.place
        for layer in self.layers:
            tokens = layer(tokens)
        tokens = self.norm(tokens)
        return self.out(torch.cat([tokens.mean(dim=1), tokens[:, -1]], dim=1))


def view_images(series: Tensor, period: int, size: tuple[int, int]) -> Tensor:
    """Return all three views of ``series`` [B, L, D] as one image [B, 3·D, h, w].

    Channels are the folded series of each variable, then the Gramian angular fields, then the
    recurrence plots.
    """
    views = (
        segmentation_image(series, period, size),
        gramian_angular_field(series, size),
        recurrence_plot(series, size),
    )
    return torch.cat(views, dim=1)


def segmentation_image(series: Tensor, period: int, size: tuple[int, int]) -> Tensor:
    """Return ``series`` [B, L, D] folded: a row of the image is a period, the last one ends it.

    A first row that is not full repeats the first value. Values are those of the series.
    """
    batch, length, variables = series.shape
    missing = -length % period
    rows = series.transpose(1, 2)
    rows = torch.cat([rows[..., :1].expand(-1, -1, missing), rows], dim=2)
    image = rows.reshape(batch, variables, -1, period)
    height, width = size
    image = _piecewise_means(image, min(width, period))
    image = _piecewise_means(image.transpose(2, 3), min(height, image.shape[2])).transpose(2, 3)
    return _enlarge(image, size)


def gramian_angular_field(series: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the cosine of the sum of two steps' angles, of ``series`` [B, L, D], in [-1, 1].

    The angle of a step is the arc cosine of its value, the least being -1 and the greatest 1; of a
    constant series all are 0. Equal to pyts's ``GramianAngularField`` where no side is longer than
    the series.
    """
    height, width = size
    row_cosine, row_sine = _angles(series, height)
    column_cosine, column_sine = _angles(series, width)
    image = row_cosine[..., :, None] * column_cosine[..., None, :]
    image = torch.addcmul(image, row_sine[..., :, None], column_sine[..., None, :], value=-1)
    return _enlarge(image, size)


def recurrence_plot(series: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the distances of two steps' values of ``series`` [B, L, D], at least 0.

    Equal to pyts's ``RecurrencePlot`` of the piecewise means where no side is longer than the
    series.
    """
    height, width = (_means_of(series, side) for side in size)
    return _enlarge((height[..., :, None] - width[..., None, :]).abs(), size)


def _angles(series: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [B, D, n] of the angles of piecewise means."""
    means = _means_of(series, side)
    least, greatest = means.amin(dim=-1, keepdim=True), means.amax(dim=-1, keepdim=True)
    spread = greatest - least
    # Means of equal values differ in their last digits, which is no structure.
    level = torch.maximum(least.abs(), greatest.abs())
    constant = spread <= 16 * torch.finfo(series.dtype).eps * level
    share = (means - least) / torch.where(constant, 1, spread)
    share = torch.where(constant, 0.5, share)
    # The sine of the arc cosine of 2 · share - 1, without the digits that 1 - cosine² would lose.
    return 2 * share - 1, 2 * (share * (1 - share)).sqrt()


def _means_of(series: Tensor, side: int) -> Tensor:
    """Return piecewise means [B, D, n] of ``series`` [B, L, D], n at most ``side``."""
    return _piecewise_means(series.transpose(1, 2), min(side, series.shape[1]))


def _piecewise_means(values: Tensor, count: int) -> Tensor:
    """Return means of ``count`` stretches of the last dimension, as pyts bounds them."""
    length = values.shape[-1]
    if count == length:
        return values
    # pyts rounds these bounds down as floats, now and then to one less than the exact value.
    bounds = np.linspace(0, length, count + 1).astype(np.int64)
    first, sizes = bounds[:-1, None], np.diff(bounds)
    place = first + np.arange(sizes.max())
    inside = torch.as_tensor(place < bounds[1:, None], device=values.device)
    index = torch.as_tensor(np.minimum(place, length - 1), device=values.device)
    sums = torch.where(inside, values[..., index], 0).sum(dim=-1)
    return sums / torch.as_tensor(sizes, device=values.device)


def _enlarge(image: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(image.shape[2:]) == size:
        return image
    return F.interpolate(image, size, mode="bilinear", align_corners=False)
