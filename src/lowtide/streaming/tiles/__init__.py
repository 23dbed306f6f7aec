"""Tiled execution: grid, merging, recovery, and measured error."""
