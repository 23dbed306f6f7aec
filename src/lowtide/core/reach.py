"""How far an output pixel of a model looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReceptiveField:
    """The farthest input pixel, along either axis, that an output pixel depends on.

    ``pixels`` is None when no bound was found up to ``searched`` pixels: the model looks at the
    whole image (global pooling or attention), or farther than is practical for tiles.
    """

    pixels: int | None
    searched: int

    @property
    def overlap(self) -> int | None:
        """Pixels that neighboring tiles must share for their results to equal the whole run."""
        return None if self.pixels is None else 2 * self.pixels
