"""Noise of a picture, estimated from its pixels, as its network is given it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from lowtide.jobs.images.chosen_noise import ImageNoise, estimate_doubts, estimate_poisson_gaussian
from lowtide.models.denoiser.config import DenoiserConfig, FiniteDenoiserConfig
from lowtide.models.denoiser.noise_level import LevelEstimate, NoiseLevel
from lowtide.models.denoiser.noise_models import GaussianNoise, network_terms


def gaussian_noise(
    bands: Iterable[np.ndarray], level: NoiseLevel, config: DenoiserConfig, sigma: float | None
) -> ImageNoise:
    """Return noise that is the same at all values; by octaves, where the network is given them.

    Args:
        bands: Rows (N, W, C) of the picture, float32 in 0..1.
        level: The estimate, before it has seen any of them.
        config: The network's configuration.
        sigma: The level that was given, of values in 0..1: what is estimated is its kind.
    """
    for rows in bands:
        level.add(rows)
    found = level.estimate()
    if sigma is not None:
        noise = _by_octaves(GaussianNoise(std=sigma), found or LevelEstimate(0.0), config)
        return replace(noise, source="given")
    if found is None:
        return unknown_noise(config)
    known = GaussianNoise(std=round(found.sigma * 255, 2) / 255)
    return replace(_by_octaves(known, found, config), doubts=estimate_doubts(found, known))


def poisson_gaussian_noise(
    bands: Iterable[np.ndarray], level: NoiseLevel, config: DenoiserConfig
) -> ImageNoise:
    """Return noise that grows with the values; arguments are those of `gaussian_noise`."""

    def seen() -> Iterator[np.ndarray]:
        for rows in bands:
            level.add(rows)
            yield rows

    known = estimate_poisson_gaussian(seen())
    found = level.estimate()
    if known is None or found is None:
        return unknown_noise(config)
    terms = network_terms(known, config)
    return ImageNoise(*terms, "estimated", doubts=estimate_doubts(found, known))


def unknown_noise(config: DenoiserConfig) -> ImageNoise:
    """Return the noise of a picture no pixel of which tells it."""
    return ImageNoise(None, (0.0,) * config.noise_parameters, "estimated")


def _by_octaves(known: GaussianNoise, found: LevelEstimate, config: DenoiserConfig) -> ImageNoise:
    sigma, parameters = network_terms(known, config)
    if isinstance(config, FiniteDenoiserConfig):
        parameters = found.shares or parameters
    return ImageNoise(sigma, parameters, "estimated", found.shared)
