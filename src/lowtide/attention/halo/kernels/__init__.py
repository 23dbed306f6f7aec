"""Triton kernels for attention in halo windows, straight from (batch, height, width, heads, dim).

A program computes a tile of one window's queries. Which keys it sees is arithmetic, so that nothing
is unfolded, padded or masked in memory. In the backward pass a program gathers what its own tile
needs, so that there are no atomics and results are the same every time. Scores are in powers of
two; softmax and all sums are in fp32.

The package is only imported where Triton is.
"""

from lowtide.attention.halo.kernels.backward import backward_bias, backward_key, backward_query
from lowtide.attention.halo.kernels.forward import forward

__all__ = ["backward_bias", "backward_key", "backward_query", "forward"]
