"""Denoise the mosaics of camera RAW files."""
