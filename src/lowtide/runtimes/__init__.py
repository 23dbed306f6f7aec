"""Runtimes other than PyTorch: networks as functions from array to array."""
