"""Enlarge pictures, and train networks that do."""
