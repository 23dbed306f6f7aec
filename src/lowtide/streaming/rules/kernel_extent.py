"""What operators that look at neighbors see."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.streaming.spans import Span


@dataclass(frozen=True)
class Kernel:
    """What a row of a result sees along one dimension: ``reach`` rows from ``row · stride -
    pad`` on."""

    reach: int
    stride: int
    pad: int

    def seen(self, span: Span) -> Span:
        """Rows of the input, beyond the image too."""
        first, last = span
        return first * self.stride - self.pad, (last - 1) * self.stride - self.pad + self.reach
