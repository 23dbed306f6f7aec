"""Sets of rows as short lists of disjoint intervals."""

from __future__ import annotations

from collections.abc import Iterable

# Rows from the first (included) to the last (excluded).
Span = tuple[int, int]
# Disjoint, sorted and not empty; every function here returns such lists.
Spans = list[Span]


def union_spans(spans: Iterable[Span]) -> Spans:
    """Return the union of the spans; adjacent ones are merged."""
    found: Spans = []
    spans = list(spans)
    if len(spans) == 1:  # the usual case
        return spans if spans[0][0] < spans[0][1] else found
    for first, last in sorted(spans):
        if first >= last:
            continue
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def subtract_spans(spans: Spans, removed: Spans) -> Spans:
    """Return the rows of ``spans`` that are not in ``removed``."""
    found: Spans = []
    for first, last in spans:
        for low, high in removed:
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


def intersect_spans(left: Spans, right: Spans) -> Spans:
    """Return the intersection of two sets of rows."""
    return [(max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) < min(b, d)]


def align_outward(spans: Iterable[Span], grain: int, size: int) -> Spans:
    """Widen spans to multiples of ``grain``, clipped to ``size`` rows."""
    return union_spans(
        (first // grain * grain, min(size, -(-last // grain) * grain)) for first, last in spans
    )


def count_rows(spans: Iterable[Span]) -> int:
    """Return the number of rows in the spans."""
    return sum(last - first for first, last in spans)
