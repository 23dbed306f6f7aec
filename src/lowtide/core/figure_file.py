"""Figures by matplotlib, which is optional, as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import UsageError, install_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 120


def new_figure(
    width: float, height: float, *, layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    """Return an empty figure of a size in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a plot needs matplotlib", hint=install_extra("plot")) from error
    return Figure(figsize=(width, height), layout=layout, dpi=DOTS_PER_INCH)


def save_figure(figure: Figure, path: Path, *, replace: bool) -> None:
    """Write a figure in the format that the suffix names, PNG without one.

    Raises:
        OutputError: The file cannot be written.
    """
    with atomic_output(path, replace=replace) as part:
        figure.savefig(part, dpi=DOTS_PER_INCH, format=_format(path))


def require_figure_name(path: Path) -> None:
    """Raise `UsageError` for a name whose suffix is no format that figures are written in."""
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if _format(path) not in known:
        raise UsageError(
            f"{path}: pictures are not written as {path.suffix}",
            hint=f"use one of {', '.join('.' + name for name in sorted(known))}",
        )


def _format(path: Path) -> str:
    return path.suffix.lstrip(".").lower() or "png"
