"""Exact execution of a graph over bands of rows."""
