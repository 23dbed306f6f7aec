"""Tables for the ``render_*.py`` scripts of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median, median_high
from string import Formatter
from typing import Any

from lowtide.core.units import format_bytes

Row = dict[str, Any]
Rows = list[Row]
Shape = Callable[[Rows], str]

NONE = "–"


def named(data: dict[str, Any]) -> Rows:
    """A result file's rows, each with the processor that it was measured on."""
    usual = data["environment"]["cpu"]
    return [
        {"processor": row.get("environment", {}).get("cpu", usual), **row} for row in data["rows"]
    ]


def table(head: str, lines: Iterable[str]) -> str:
    """A Markdown table of a head and of lines, whose cells have " | " between; "" of no lines."""
    lines = list(lines)
    rule = " | ".join(["---"] * (head.count(" | ") + 1))
    return "\n".join(f"| {line} |" for line in (head, rule, *lines)) if lines else ""


def tabled(rows: Iterable[Row], head: str, template: str, **more: Callable[[Row], Any]) -> str:
    """A Markdown table with a line for each row; see `filled`."""
    return table(head, (filled(row, template, **more) for row in rows))


def filled(row: Row, template: str, **more: Callable[[Row], Any]) -> str:
    """A template with a row's figures in it, and with ``more``, made of the row.

    As `str.format` does it; beyond that a name that ends with "?" need not be there, None is
    "–", a unit may follow a format (``{psnr_db:.1f dB}``), and there are these formats: ``bytes``,
    ``yes`` (or "no"), ``yes!`` (or "**no**"); and, followed by the format of a number, ``spread``,
    ``median`` and ``high``, the upper one of two medians.
    """
    values = {**row, **{name: make(row) for name, make in more.items()}}
    return _Cells().vformat(template, (), values)


class _Cells(Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = field_name.removesuffix("?")
        if name != field_name and name not in kwargs:
            return None, name
        return super().get_field(name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return NONE
        number, space, unit = format_spec.partition(" ")
        if number == "bytes":
            return format_bytes(value)
        if number in ("yes", "yes!"):
            return "yes" if value else "**no**" if number == "yes!" else "no"
        if number.startswith("spread"):
            return spread(value, number.removeprefix("spread") or ".2f")
        for name, middle in {"median": median, "high": median_high}.items():
            if number.startswith(name):
                value, number = middle(value), number.removeprefix(name)
        return f"{format(value, number)}{space}{unit}"


def by_part(rows: Rows, shapes: Mapping[str, Shape]) -> str:
    """What each of ``shapes`` makes of the rows whose ``part`` it is of, if there are any."""
    parts = {name: [row for row in rows if row["part"] == name] for name in shapes}
    return joined(*(shape(parts[name]) for name, shape in shapes.items() if parts[name]))


def joined(*parts: str) -> str:
    """Parts of a text, without those that are empty."""
    return "\n\n".join(part for part in parts if part)


def spread(figures: dict[str, float], number: str = ".2f") -> str:
    """A ratio's median and its range."""
    middle, least, most = (format(figures[name], number) for name in ("median", "min", "max"))
    return f"{middle} ({least} to {most})"


def figure(name: str, value: Any) -> str:
    """A value in the unit that its name ends with; a median with its range if there is one."""
    if value is None or isinstance(value, str):
        return value or NONE
    if isinstance(value, dict):
        middle, low, high = (figure(name, value[key]) for key in ("median", "min", "max"))
        return f"{middle} ({low} to {high})"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_db"):
        return f"{value:.2f} dB"
    return f"{value:.3f}" if name == "ratio" or value < 1 else f"{value:.1f}"
