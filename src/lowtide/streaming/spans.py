"""Sets of rows as short lists of intervals."""

from __future__ import annotations

from collections.abc import Iterable

# Rows from the first to before the last.
Span = tuple[int, int]
# Disjoint, in order, and not empty; such lists are what all functions here return.
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """All rows that are in any of them; spans that touch become one."""
    found: Spans = []
    spans = list(spans)
    if len(spans) == 1:  # nearly always
        return spans if spans[0][0] < spans[0][1] else found
    for first, last in sorted(spans):
        if first >= last:
            continue
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def without(spans: Spans, gone: Spans) -> Spans:
    """Rows of ``spans`` that are not in ``gone``."""
    found: Spans = []
    for first, last in spans:
        for low, high in gone:
            if high <= first or low >= last:
                continue
            if low > first:
                found.append((first, low))
            first = max(first, high)
            if first >= last:
                break
        if first < last:
            found.append((first, last))
    return found


def common(left: Spans, right: Spans) -> Spans:
    """Rows that are in both."""
    return [(max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) < min(b, d)]


def outward(spans: Iterable[Span], grain: int, size: int) -> Spans:
    """Spans widened to multiples of ``grain``, as far as there are rows."""
    return union(
        (first // grain * grain, min(size, -(-last // grain) * grain)) for first, last in spans
    )


def count(spans: Iterable[Span]) -> int:
    """How many rows these are."""
    return sum(last - first for first, last in spans)
