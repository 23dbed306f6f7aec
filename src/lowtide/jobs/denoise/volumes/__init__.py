"""Denoise NIfTI volumes."""
