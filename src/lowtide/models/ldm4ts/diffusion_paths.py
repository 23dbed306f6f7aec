"""Sample paths of residuals drawn by latent diffusion, given what is known at each origin."""

from __future__ import annotations

import numpy as np

from lowtide.models.ldm4ts.model import LDM4TSModel


class DiffusionPathSampler:
    """Residual paths of a trained `LDM4TSModel`, for the windows of one table.

    A `PathSampler`. Horizons shorter than the model's are the first steps of its paths.

    Args:
        model: The model.
        values: The table's standardized series [T, D] without NaN.
        steps: Steps of the diffusion's sampler.
    """

    def __init__(self, model: LDM4TSModel, values: np.ndarray, steps: int) -> None:
        self._model, self._values, self._steps = model, values.astype(np.float32), steps

    def sample(self, origin: int, paths: np.ndarray, *, seed: int) -> None:
        """Fill ``paths`` [S, H, D] for the window at ``origin``, at least the look-back."""
        context = self._values[origin - self._model.config.look_back : origin]
        drawn = self._model.sample_residuals(
            context, len(paths), seed=seed, key=origin, steps=self._steps
        )
        paths[:] = drawn[:, : paths.shape[1]].numpy()
