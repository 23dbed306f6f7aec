"""Lists of intervals against sets of numbers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lowtide.streaming.spans import (
    align_outward,
    count_rows,
    intersect_spans,
    subtract_spans,
    union_spans,
)

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


def rows(spans):
    return {row for first, last in spans for row in range(first, last)}


def tidy(spans):
    return all(first < last for first, last in spans) and all(
        before[1] < after[0] for before, after in pairwise(spans)
    )


@given(SPANS, SPANS)
def test_spans_behave_as_sets(left, right):
    a, b = union_spans(left), union_spans(right)
    assert tidy(a)
    assert rows(a) == rows(left)
    assert rows(subtract_spans(a, b)) == rows(a) - rows(b)
    assert rows(intersect_spans(a, b)) == rows(a) & rows(b)
    assert count_rows(a) == len(rows(a))


@given(SPANS, st.integers(1, 9))
def test_outward_ends_at_the_grain_or_the_end(spans, grain):
    found = align_outward(union_spans(spans), grain, 43)
    assert tidy(found)
    assert rows(union_spans(spans)) <= rows(found)
    assert all(first % grain == 0 and (last % grain == 0 or last == 43) for first, last in found)
