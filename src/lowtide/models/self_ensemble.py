"""Geometric self-ensemble (×8 test-time augmentation) of a model."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from lowtide.models.descriptor import ModelDescriptor

_MIRRORS: tuple[tuple[int, ...], ...] = ((), (2,), (3,), (2, 3))


class SelfEnsemble(nn.Module):
    """Mean of ``body`` over the eight flips and transposes of an image (EDSR's "+").

    (B, C, H, W) becomes what ``body`` makes of it, at about eight times the time; results are
    accumulated one by one, so that it takes one more result in memory. Source: "geometric
    self-ensemble" of EDSR (Lim et al., arXiv 1707.02921).
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) to the mean of ``body`` over its flips and transposes.

        The result has the shape that ``body`` gives it, such as (B, C, H * scale, W * scale).
        """
        total = self._sum_flips(image) + self._sum_flips(image.mT).mT
        return total / (2 * len(_MIRRORS))

    def _sum_flips(self, image: Tensor) -> Tensor:
        """Sum over the four flips, without a transpose."""
        total = self.body(image)
        for dims in _MIRRORS[1:]:
            total = total + self.body(image.flip(dims)).flip(dims)
        return total


def as_ensemble(model: ModelDescriptor) -> ModelDescriptor:
    """Return the model's descriptor with another SHA-256 for its self-ensemble.

    What was measured of the model alone does not hold for the ensemble.
    """
    return replace(model, sha256=f"{model.sha256}-self-ensemble")
