"""Measure the noise of a camera or a scanner."""
