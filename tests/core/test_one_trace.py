"""Things that a trace makes once."""

import pytest

from lowtide.core.one_trace import once, one_trace


def test_a_thing_is_made_once_within_a_trace_and_anew_in_the_next():
    made = []

    def make():
        made.append(len(made))
        return made[-1]

    with one_trace():
        assert [once("a", make), once("a", make), once("b", make), once("a", make)] == [0, 0, 1, 0]
    with one_trace():
        assert once("a", make) == 2
    assert [once("a", make), once("a", make)] == [3, 4]


def test_a_trace_that_fails_leaves_nothing():
    with pytest.raises(ValueError, match="no graph"), one_trace():
        once("a", lambda: 1)
        raise ValueError("no graph")
    assert once("a", lambda: 2) == 2
