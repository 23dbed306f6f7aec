"""Diffusion of LDM4TS: its angles, its closed-form part, and the sampler.

A latent x0 and Gaussian noise e make the noisy latent x = cos(θ) x0 + sin(θ) e at an angle θ, whose
velocity is v = dx/dθ = cos(θ) e - sin(θ) x0 (Salimans and Ho, "Progressive Distillation for Fast
Sampling of Diffusion Models", 2022). Angles are spread evenly up to π/2, where nothing of x0 is
left (Lin et al., "Common Diffusion Noise Schedules and Sample Steps Are Flawed", 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

# Principal components of the latent whose variance is measured; the others share one.
_COMPONENTS = 256
# Variance below which a component does not vary.
_LEAST = 1e-6
# Angle of the last step, of which x0 is computed from a velocity.
_LAST_ANGLE = 0.04


class ScheduleAngles(nn.Module):
    """Angles of the times 0 … ``steps`` - 1, as cosine and sine [steps]."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        # Of what is left to π/2, so that the last cosine is exactly zero.
        left = torch.arange(steps - 1, -1, -1, dtype=torch.float64) * (math.pi / 2 / steps)
        self.register_buffer("cosine", left.sin().float(), persistent=False)
        self.register_buffer("sine", left.cos().float(), persistent=False)

    def of(self, time: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of times (B,), to be multiplied with ``like`` (B, ...)."""
        shape = -1, *(1,) * (like.dim() - 1)
        return self.cosine[time].view(shape), self.sine[time].view(shape)

    def sampling_times(self, count: int) -> list[int]:
        """Return the times of ``count`` sampling steps, from the largest to about 0."""
        last = max(round(_LAST_ANGLE * self.steps / (math.pi / 2)) - 1, 0)
        last = min(last, self.steps - count)
        return torch.linspace(self.steps - 1, last, count).round().int().tolist()


class GaussianLatent(nn.Module):
    """Gaussian of latents, low-rank plus isotropic: the closed-form part of the velocity.

    What the U-Net adds to it is what is not Gaussian and what depends on the look-back. Before
    `fit` it is the standard normal, whose velocity is zero.

    Args:
        shape: Channels, height and width of the latent.
    """

    basis: Tensor
    variance: Tensor
    rest: Tensor

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        size = math.prod(shape)
        rank = min(_COMPONENTS, size)
        self.register_buffer("basis", torch.eye(rank, size))
        self.register_buffer("variance", torch.ones(rank))
        self.register_buffer("rest", torch.ones(()))

    def fit(self, latents: Tensor) -> None:
        """Measure the variances of latents [N, C, h, w]; their mean counts as zero."""
        flat = latents.flatten(1).double()
        count, size = flat.shape
        rank = min(len(self.variance), count)
        # Of the smaller of the two Gram matrices.
        if count < size:
            power, vectors = torch.linalg.eigh(flat @ flat.T / count)
            basis = vectors[:, -rank:].T @ flat
            basis = basis / basis.norm(dim=1, keepdim=True).clamp_min(1e-30)
        else:
            power, vectors = torch.linalg.eigh(flat.T @ flat / count)
            basis = vectors[:, -rank:].T
        left = flat.square().sum() / count - power[-rank:].sum()
        rest = (left / max(size - rank, 1)).clamp_min(0) if size > rank else torch.ones(())
        self.basis.zero_()
        self.basis[:rank].copy_(basis)
        self.variance.copy_(rest.expand_as(self.variance))
        self.variance[:rank].copy_(power[-rank:].clamp_min(0))
        self.rest.copy_(rest)

    def velocity(self, noisy: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the mean velocity of ``noisy`` (B, C, h, w); cosine and sine are (B,) or ()."""

        def factor(variance: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
            return sine * cosine * (1 - variance) / _power(variance, cosine, sine)

        return self._scaled(noisy, factor, cosine, sine)

    def inside(self, latent: Tensor) -> Tensor:
        """Return ``latent`` (B, C, h, w) without the components that do not vary."""
        one = torch.ones((), device=latent.device)
        return self._scaled(latent, lambda variance, *_: (variance > _LEAST).float(), one, one)

    def whiten(self, noisy: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return ``noisy`` (B, C, h, w) divided by its deviation, component by component."""
        return self._scaled(noisy, lambda *one: _power(*one).rsqrt(), cosine, sine)

    def color(self, white: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Invert `whiten`."""
        return self._scaled(white, lambda *one: _power(*one).sqrt(), cosine, sine)

    def _scaled(
        self,
        latent: Tensor,
        factor: Callable[[Tensor, Tensor, Tensor], Tensor],
        cosine: Tensor,
        sine: Tensor,
    ) -> Tensor:
        """Multiply each component of ``latent`` by the factor of its variance.

        In fp32 under autocast too: bfloat16 has no digits left for the part without variance.
        """
        kind = latent.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self._scaled(latent.float(), factor, cosine, sine)
        flat, cosine, sine = latent.flatten(1), cosine.reshape(-1, 1), sine.reshape(-1, 1)
        others = factor(self.rest, cosine, sine)
        part = (factor(self.variance, cosine, sine) - others) * (flat @ self.basis.T)
        return (others * flat + part @ self.basis).reshape(latent.shape)


def sample_latents(
    noise: Tensor,
    velocity: Callable[[Tensor, Tensor], Tensor],
    angles: ScheduleAngles,
    gaussian: GaussianLatent,
    steps: int,
) -> Tensor:
    """Return latents (B, C, h, w) that ``noise``, of that shape, becomes in few steps.

    The Gaussian part of the way is exact for any number of steps: what is integrated, by the
    two-step method of Adams and Bashforth, is what the velocity adds to it, in coordinates in which
    the Gaussian stands still. DDIM instead shrinks latents of deviation 1 to 0.88 in 10 steps. The
    last step ends at the latent that its velocity points to; a single step is therefore the mean.

    Args:
        noise: Standard normal numbers.
        velocity: Function of noisy latents (B, C, h, w) and times (B,).
        angles: Angles of the times.
        gaussian: Gaussian of the latents.
        steps: Calls of ``velocity``.
    """
    noisy, earlier = noise, None
    times = torch.tensor(angles.sampling_times(steps), device=noise.device)
    for time, after in pairwise(times):
        cosine, sine = angles.cosine[time], angles.sine[time]
        excess = velocity(noisy, time.expand(len(noisy))) - gaussian.velocity(noisy, cosine, sine)
        excess = gaussian.whiten(excess, cosine, sine)
        length = (time - after) * (math.pi / 2 / angles.steps)
        slope = excess
        if earlier is not None:
            slope = excess + (excess - earlier[0]) * (0.5 * length / earlier[1])
        white = gaussian.whiten(noisy, cosine, sine) - length * slope
        noisy = gaussian.color(white, angles.cosine[after], angles.sine[after])
        earlier = excess, length
    last = times[-1]
    speed = velocity(noisy, last.expand(len(noisy)))
    return angles.cosine[last] * noisy - angles.sine[last] * speed


def _power(variance: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return the variance of a noisy component."""
    return cosine.square() * variance + sine.square()
