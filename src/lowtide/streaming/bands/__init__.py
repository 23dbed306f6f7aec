"""Exact streaming: a model's own graph, run over bands of rows."""
