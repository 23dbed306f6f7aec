"""Autoencoder of residual paths in closed form; variance is measured, and none is lost."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.ldm4ts.config import LDM4TSConfig
from lowtide.models.ldm4ts.kl_autoencoder import KLPathAutoencoder, require_paths
from lowtide.models.ldm4ts.path_image import PathImageMap

# Side of a patch of the path image, which is a pixel of the latent.
_PATCH = 8
# Most components of a path, beside the pixels of the latent; and those of a latent that has more
# values than components, of which a low-rank Gaussian of it then misses none.
_MOST_COMPONENTS, _MOST_SPREAD = 1024, 256
# Components whose deviation is less than this part of the largest are rounding errors in float32.
_LEAST_DEVIATION = 1e-5
# Path images that pass through the convolution at once.
_CHUNK = 16


class PatchAutoencoder(nn.Module):
    """Closed-form autoencoder: whitened principal components, each near the patches it is about.

    Latents of the paths it was fitted to have no correlation and unit variance. The latent is
    turned so that its values are as close to those of patches of the path image (cosines of low
    frequency, by a strided convolution) as values without correlation can be. Components that have
    no place in it are Gaussian noise of their measured variance: probabilistic principal
    components, so that decoded standard normal numbers have the covariance of the paths but for
    that between steps and variables in this noise. Before `fit`, components are cosines of steps
    and variables of unit variance.

    A latent has at most ``latent_channels`` channels, and not more than there are components: fewer
    for short paths. All tensors are float32 buffers.

    Args:
        config: Horizon, variables, period, image size and channels.

    Attributes:
        latent_shape: Channels, height and width of a latent.
        noise_shape: Shape [H, D] of the noise of a path.
    """

    mean: Tensor
    components: Tensor
    deviations: Tensor
    placement: Tensor
    rest: Tensor

    def __init__(self, config: LDM4TSConfig) -> None:
        super().__init__()
        self.noise_shape = horizon, variables = config.horizon, config.variables
        height, width = (side // _PATCH for side in config.image_size)
        places, size = height * width, horizon * variables
        most = min(size, _MOST_COMPONENTS)
        room = most // places if most > _MOST_SPREAD else -(-most // places)
        channels = max(1, min(config.latent_channels, room))
        self.latent_shape = channels, height, width
        count = channels * places
        if count > most:
            count = min(most, _MOST_SPREAD)
        with torch.device("cpu"):
            self._image = PathImageMap(horizon, variables, config.period, config.image_size)
            frequencies = _cosines(horizon)[: -(-count // variables)]
            basis = torch.kron(frequencies, _cosines(variables))[:count]
            self.register_buffer("mean", torch.zeros(size))
            self.register_buffer("components", torch.empty(count, size))
            self.register_buffer("deviations", torch.empty(count))
            self.register_buffer("placement", torch.empty(count, channels * places))
            self.register_buffer("rest", torch.empty(size))
            self._set(basis.new_zeros(size), basis, basis.new_ones(count), basis.new_ones(size))

    @torch.no_grad()
    def fit(self, paths: Tensor) -> None:
        """Measure mean, components and noise of ``paths`` [N, H, D], in float64.

        Raises:
            InputError: There are fewer than two paths, or values that are not finite.
        """
        require_paths(paths)
        flat = paths.flatten(1).to("cpu", torch.float64)
        mean = flat.mean(dim=0)
        flat = (flat - mean) / math.sqrt(len(flat))
        found, rows = _principal_components(flat)
        count = len(self.deviations)
        basis, deviations = rows.new_zeros(count, flat.shape[1]), rows.new_zeros(count)
        kept = int((found[:count] > _LEAST_DEVIATION * found[0]).sum())
        if kept < count:
            kept = min(kept, _MOST_SPREAD)
        basis[:kept], deviations[:kept] = rows[:kept], found[:kept]
        self._set(mean, basis, deviations, flat.square().sum(dim=0))

    def encode(self, paths: Tensor) -> Tensor:
        """Return the latent [B, C, h, w] of ``paths`` [B, H, D]."""
        scores = (paths.flatten(1) - self.mean) @ self.components.T
        present = self.deviations > 0
        scores = torch.where(present, scores / torch.where(present, self.deviations, 1), 0)
        return (scores @ self.placement).unflatten(1, self.latent_shape)

    def decode(self, latent: Tensor, noise: Tensor) -> Tensor:
        """Return the paths [B, H, D] of ``latent`` [B, C, h, w].

        Args:
            latent: Latents.
            noise: Standard normal numbers [B, H, D]; zeros leave what is not in the latent out.
        """
        scores = (latent.flatten(1) @ self.placement.T) * self.deviations
        flat = self.mean + scores @ self.components + noise.flatten(1) * self.rest
        return flat.unflatten(1, self.noise_shape)

    def _set(self, mean: Tensor, basis: Tensor, deviations: Tensor, variance: Tensor) -> None:
        """Set buffers from components [R, H·D], their deviations [R] and the variance [H·D]."""
        scaled = basis * deviations[:, None]
        rest = (variance - scaled.square().sum(dim=0)).clamp_min(0).sqrt()
        # Where no component is left out the difference is rounding error.
        rest = torch.where(rest > _LEAST_DEVIATION * variance.sqrt(), rest, 0)
        self.mean.copy_(mean)
        self.components.copy_(basis)
        self.deviations.copy_(deviations)
        self.placement.copy_(self._place(scaled))
        self.rest.copy_(rest)

    def _place(self, scaled: Tensor) -> Tensor:
        """Return orthonormal rows [R, C·h·w] nearest to the patches' values of components."""
        images = (
            self._image.to_image(part.unflatten(1, self.noise_shape))
            for part in scaled.split(_CHUNK)
        )
        # Filters overlap by half, so that no two patches of the same steps are alike.
        with torch.device("cpu"):
            filters = _cosine_filters(self.noise_shape[1], self.latent_shape[0])
        parts = [F.conv2d(one, filters, stride=_PATCH, padding=_PATCH // 2) for one in images]
        left, _, right = torch.linalg.svd(torch.cat(parts).flatten(1), full_matrices=False)
        return left @ right


def build_autoencoder(config: LDM4TSConfig) -> PatchAutoencoder | KLPathAutoencoder:
    """Return the autoencoder of a configuration, frozen and in evaluation mode."""
    kind = PatchAutoencoder if config.autoencoder is None else KLPathAutoencoder
    return kind(config).requires_grad_(False).eval()


def _principal_components(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return deviations [R], largest first, and components [R, size] of ``flat`` [N, size]."""
    if len(flat) >= flat.shape[1]:
        power, vectors = torch.linalg.eigh(flat.T @ flat)
        return power.clamp_min(0).sqrt().flip(0), vectors.T.flip(0)
    power, vectors = torch.linalg.eigh(flat @ flat.T)
    deviations, rows = power.clamp_min(0).sqrt().flip(0), (vectors.T @ flat).flip(0)
    return deviations, rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def _cosines(size: int) -> Tensor:
    """Return the orthonormal cosine basis [size, size], float64, lowest frequency first."""
    place = torch.arange(size, dtype=torch.float64) + 0.5
    basis = torch.cos(math.pi / size * place * torch.arange(size)[:, None])
    return basis / basis.norm(dim=1, keepdim=True)


def _cosine_filters(variables: int, channels: int) -> Tensor:
    """Return the filters [C, D, 2 p, 2 p] of lowest frequency over variables, rows and columns."""
    side = 2 * _PATCH
    sizes = variables, side, side
    orders = torch.cartesian_prod(*(torch.arange(size) for size in sizes))
    lowest = orders.sum(dim=1).argsort(stable=True)[:channels]
    across, within = _cosines(variables), _cosines(side)
    first, second, third = orders[lowest].T
    return torch.einsum("cd,ch,cw->cdhw", across[first], within[second], within[third])
