"""Side-by-side table of a predicted and a measured ledger."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.core.units import format_bytes
from lowtide.memory.ledger import LedgerRow

_HEAD = ("", "predicted", "at most", "measured")


def compare_ledgers(predicted: Iterable[LedgerRow], measured: Iterable[LedgerRow]) -> str:
    """Format two ledgers as a table, row by row, with totals and a verdict.

    Bytes are in binary units. A measurement can have other rows than a prediction: a dash marks a
    row that one side does not have. The totals are comparable only if both ledgers count what
    existed before, such as weights, or neither does.
    """
    expected, found = _by_name(predicted), _by_name(measured)
    lines: list[tuple[str, ...]] = [_HEAD]
    for name in dict.fromkeys((*expected, *found)):
        value, upper = expected.get(name, (None, None))
        size, _ = found.get(name, (None, None))
        lines.append((name, _size(value), _size(upper), _size(size)))
    value, upper = (sum(row[part] for row in expected.values()) for part in (0, 1))
    total = sum(size for size, _ in found.values())
    lines.append(("total", _size(value), _size(upper), _size(total)))
    return "\n".join((*_aligned(lines), _verdict(value, upper, total)))


def _by_name(rows: Iterable[LedgerRow]) -> dict[str, tuple[int, int]]:
    """Sum (value, upper) over the rows of each name."""
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        value, upper = sums.get(row.name, (0, 0))
        sums[row.name] = value + row.value, upper + row.upper
    return sums


def _size(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return [
        name.ljust(first)
        + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, others, strict=True))
        for name, *cells in lines
    ]


def _verdict(value: int, upper: int, total: int) -> str:
    ratio = f"measured / predicted {total / value:.3f}, " if value else ""
    if total <= upper:
        return f"{ratio}within the bound"
    return f"{ratio}over the bound by {format_bytes(total - upper)}"
