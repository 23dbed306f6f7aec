"""Streamed execution: bands, tiles, pages, planner and runner."""
