"""Attention in halo windows by Triton kernels."""
