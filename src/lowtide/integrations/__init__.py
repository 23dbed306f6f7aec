"""Integrations with other libraries: their modules, fitted into a memory budget."""
