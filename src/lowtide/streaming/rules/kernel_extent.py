"""Receptive field of a kernel along one dim."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.streaming.spans import Span


@dataclass(frozen=True)
class Kernel:
    """Receptive field along one dim: ``extent`` rows from ``row · stride - pad`` on."""

    extent: int
    stride: int
    pad: int

    def receptive_field(self, span: Span) -> Span:
        """Return the input rows of a span of the result, unclipped at the image's ends."""
        first, last = span
        return first * self.stride - self.pad, (last - 1) * self.stride - self.pad + self.extent
