"""Modules that know which rows of an image a row of their result depends on."""

from __future__ import annotations

from torch import Tensor, nn


class RowRegionModule(nn.Module):
    """Takes (batch, channels, height, width) and returns the same shape, all of it or some rows.

    Run by bands such a module is asked, not tried, for the rows that it looks at.
    """

    def rows_needed(self, first: int, last: int, height: int, width: int) -> tuple[int, int]:
        """Rows of the input that the result's rows from ``first`` to ``last`` depend on, in an
        image of ``height`` × ``width``."""
        raise NotImplementedError

    def forward_rows(self, image: Tensor, first: int, last: int, height: int) -> Tensor:
        """Rows ``first`` to ``last`` of the result for an image of ``height`` rows, of which
        ``image`` holds just those that `rows_needed` names."""
        raise NotImplementedError

    def row_grain(self, height: int, width: int) -> int:
        """Rows of the result that are computed together, counted from the first: bands that end
        between them compute some twice."""
        raise NotImplementedError
