"""Base class of modules that can compute some rows of their result."""

from __future__ import annotations

from torch import Tensor, nn


class RowRegionModule(nn.Module):
    """Module from (B, C, H, W) to the same shape that can compute some rows alone.

    Band execution queries such a module for the input rows it needs, instead of probing its
    receptive field.
    """

    def rows_needed(self, first: int, last: int, height: int, width: int) -> tuple[int, int]:
        """Return the input rows that rows ``first`` to ``last`` of the result need.

        In an image of ``height`` × ``width``.
        """
        raise NotImplementedError

    def forward_rows(self, image: Tensor, first: int, last: int, height: int) -> Tensor:
        """Return rows ``first`` to ``last`` of the result for an image of ``height`` rows.

        ``image`` is (B, C, rows, W) with exactly the rows that `rows_needed` returns, the result
        (B, C, result rows, W).
        """
        raise NotImplementedError

    def row_multiple(self, height: int, width: int) -> int:
        """Return the number of result rows computed together, counted from the first.

        Bands that end between multiples of it compute some rows twice.
        """
        raise NotImplementedError
