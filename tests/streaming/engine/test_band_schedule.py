"""Which rows are made when: what is kept of a sweep's bands, and what they leave to each other."""

import random
import tracemalloc

import pytest
import torch
from torch import nn

from lowtide.streaming.engine.band_schedule import LastUseMap, schedule_bands
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.spans import union_spans
from support.band_runs import program_of


def test_the_last_number_of_each_row_is_that_of_a_plain_list():
    draw = random.Random(0)
    for _ in range(200):
        size = draw.randint(1, 40)
        plain, last = [-1] * size, LastUseMap(size)
        for number in range(draw.randint(0, 12)):
            first = draw.randrange(size)
            span = first, draw.randint(first + 1, size)
            plain[slice(*span)] = [number] * (span[1] - span[0])
            last.put(span, number)
        for number in range(-1, 12):
            low = draw.randrange(size)
            span = low, draw.randint(low + 1, size)
            rows = [(row, row + 1) for row in range(*span) if plain[row] > number]
            assert last.above(span, number) == union_spans(rows)


class _Rolled(nn.Module):
    """Rows that are taken at their place and three rows further, round the image's end."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 5, padding=2)

    def forward(self, image):
        there = self.first(image)
        return self.second(torch.roll(there, 3, 2)) + there


def test_a_row_is_held_as_long_as_a_later_band_needs_it():
    program = program_of(_Rolled(), torch.rand(1, 3, 37, 9))
    (part,) = cut_segments(program)
    plan = list(schedule_bands(program, part, 6))
    for index in part.steps:
        made = [
            row for band in plan for span in band.computed.get(index, []) for row in range(*span)
        ]
        assert len(made) == len(set(made)), "a row was made twice"
    # The last rows are rolled to the top: made for the first band, they wait for their own place.
    first = part.steps[0]
    assert (34, 37) in plan[0].computed[first]
    assert [(34, 37) in band.held.get(first, []) for band in plan] == [True] * 5 + [False]
    (given,) = program.graph.inputs
    for band, *others in (plan[at:] for at in range(6)):
        assert band.later_reads.get(given, []) == union_spans(
            span for later in others for span in later.reads.get(given, [])
        )


@pytest.mark.slow
def test_thousands_of_bands_are_not_there_at_once():
    net = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(12)))
    program = program_of(net, torch.rand(1, 3, 3000, 4))
    (part,) = cut_segments(program)
    tracemalloc.start()
    bands = sum(1 for _ in schedule_bands(program, part, 3000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert bands == 3000
    assert most < 1 << 20
