"""Enlarge videos, in segments that resume."""
