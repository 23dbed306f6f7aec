"""Receptive field of a model, in input pixels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReceptiveField:
    """Radius of a model's receptive field in input pixels, the larger of both axes.

    ``radius`` is None when no bound was found up to ``search_limit`` pixels: the model depends on
    the whole image (global pooling or attention), or on more than is practical for tiles.
    """

    radius: int | None
    search_limit: int

    @property
    def overlap(self) -> int | None:
        """Overlap in pixels with which tiles give the result of the whole image.

        None if the receptive field has no bound.
        """
        return None if self.radius is None else 2 * self.radius
