"""Hints of how to install what is missing. Lowtide is installed from its sources."""

from __future__ import annotations

_WHERE = "in the folder of Lowtide's sources"
REINSTALL = f"{_WHERE}: pip install --force-reinstall ."


def install_extra(name: str) -> str:
    """Return the hint that installs an extra, such as ``"video"``."""
    return f"{_WHERE}: pip install '.[{name}]'"
