"""Attention: which backends this machine has, and why one is missing."""
