"""Triton kernels for halo window attention on (B, H, W, heads, head dim) tensors.

A program computes a tile of one window's queries. It computes the positions of its keys, so that
nothing is unfolded, padded or masked in memory. In the backward pass a program gathers what its own
tile needs, so that there are no atomics and results are deterministic. Scores use base 2; softmax
and all sums are in fp32.

Import this package only where Triton is installed.
"""

from lowtide.attention.halo.kernels.backward import backward_bias, backward_key, backward_query
from lowtide.attention.halo.kernels.forward import forward

__all__ = ["backward_bias", "backward_key", "backward_query", "forward"]
