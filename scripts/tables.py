"""Tables for the ``render_*.py`` scripts of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.core.units import format_bytes

Rows = list[dict[str, Any]]
Cells = list[list[str]]

NONE = "–"


def named(data: dict[str, Any]) -> Rows:
    """A result file's rows, each with the processor that it was measured on."""
    usual = data["environment"]["cpu"]
    return [
        {"processor": row.get("environment", {}).get("cpu", usual), **row} for row in data["rows"]
    ]


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells))


def spread(figures: dict[str, float]) -> str:
    """A ratio's median and its range."""
    return "{median:.2f} ({min:.2f} to {max:.2f})".format(**figures)


def figure(name: str, value: Any) -> str:
    """A value in the unit that its name ends with; a median with its range if there is one."""
    if value is None or isinstance(value, str):
        return value or NONE
    if isinstance(value, dict):
        median, low, high = (figure(name, value[key]) for key in ("median", "min", "max"))
        return f"{median} ({low} to {high})"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_db"):
        return f"{value:.2f} dB"
    return f"{value:.3f}" if name == "ratio" or value < 1 else f"{value:.1f}"
