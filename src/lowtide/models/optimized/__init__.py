"""Faster replacements for modules of spandrel's models, equal up to rounding."""
