"""Faster forms of parts of other people's models, with the same numbers up to rounding."""
