"""A model asked eight times: turned and mirrored, and the mean of what it says."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from lowtide.models.descriptor import ModelDescriptor

_MIRRORS: tuple[tuple[int, ...], ...] = ((), (2,), (3,), (2, 3))


class SelfEnsemble(nn.Module):
    """The mean over the eight ways in which an image can be turned and mirrored, each put back.

    (B, C, H, W) becomes what ``body`` makes of it, at about eight times the time; results are
    added up one by one, so that it takes one result more in memory. Source: "geometric
    self-ensemble" of EDSR (Lim et al., arXiv 1707.02921).
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, image: Tensor) -> Tensor:
        """The mean; see the class."""
        total = self._mirrored(image) + self._mirrored(image.mT).mT
        return total / (2 * len(_MIRRORS))

    def _mirrored(self, image: Tensor) -> Tensor:
        """The sum over the ways without a turn."""
        total = self.body(image)
        for dims in _MIRRORS[1:]:
            total = total + self.body(image.flip(dims)).flip(dims)
        return total


def as_ensemble(model: ModelDescriptor) -> ModelDescriptor:
    """Facts about the model asked eight times: what was learned of it once is not true of this."""
    return replace(model, sha256=f"{model.sha256}-self-ensemble")
