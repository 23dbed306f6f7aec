"""Features of the look-back that LDM4TS is conditioned on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.ldm4ts.blocks import AttentionChoice, TransformerLayer, group_norm
from lowtide.models.ldm4ts.config import LDM4TSConfig
from lowtide.models.ldm4ts.views import view_images

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
