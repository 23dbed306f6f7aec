"""Measurements of a model: receptive field, memory and time."""
