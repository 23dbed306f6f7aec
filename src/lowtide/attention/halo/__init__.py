"""Triton kernels for halo window attention over images."""
