"""Simulation of PyTorch's CUDA caching allocator, without a GPU."""
