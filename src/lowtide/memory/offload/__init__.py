"""Weights beyond the budget, streamed block by block."""
