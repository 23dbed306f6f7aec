"""Things that a trace makes once."""

import pytest
import torch

from lowtide.core.trace_cache import cached_in_trace, trace_cache


def test_a_thing_is_made_once_within_a_trace_and_anew_in_the_next():
    made = []

    def make():
        made.append(len(made))
        return made[-1]

    with trace_cache():
        assert [
            cached_in_trace("a", make),
            cached_in_trace("a", make),
            cached_in_trace("b", make),
            cached_in_trace("a", make),
        ] == [0, 0, 1, 0]
    with trace_cache():
        assert cached_in_trace("a", make) == 2
    assert [cached_in_trace("a", make), cached_in_trace("a", make)] == [3, 4]


def test_symbolic_sizes_are_part_of_the_key():
    made = []

    class Twice(torch.nn.Module):
        def forward(self, image):
            with trace_cache():
                for side in (*image.shape[2:], *image.shape[2:]):
                    cached_in_trace((side, "ones"), lambda side=side: made.append(side))
            return image + len(made)

    free = torch.export.Dim.DYNAMIC
    image = torch.zeros(1, 1, 5, 7)
    graph = torch.export.export(Twice(), (image,), dynamic_shapes=({2: free, 3: free},))
    # Each side once, in each pass that the exporter makes over it.
    assert len({str(side) for side in made}) == 2
    assert graph.module()(image).max() == 2


def test_a_trace_that_fails_leaves_nothing():
    with pytest.raises(ValueError, match="no graph"), trace_cache():
        cached_in_trace("a", lambda: 1)
        raise ValueError("no graph")
    assert cached_in_trace("a", lambda: 2) == 2
