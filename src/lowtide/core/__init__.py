"""Shared base layer: errors, units, progress, files and heap.

Imports no other package of Lowtide, and no heavy library on import.
"""
