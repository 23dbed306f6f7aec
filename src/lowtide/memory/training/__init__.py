"""Fitting a training step to a memory budget: option search, plot, VRAM estimate."""
