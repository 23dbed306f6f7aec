"""What a program is cut into."""

import torch
from torch import nn

from lowtide.streaming.engine.segments import cut_segments
from support.band_runs import program_of


class Doubling(nn.Module):
    """Light operators each of whose results is taken twice by the next: 2⁸⁰ ways lead back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, image):
        result = self.first(image)
        for _ in range(80):
            result = result + result.relu()
        return self.last(result)


def test_light_operators_on_many_ways_are_looked_at_once():
    program = program_of(Doubling().eval(), torch.rand(1, 3, 32, 32))
    steps = list(program.steps)
    first, second = cut_segments(program, [steps[-1]])
    # All of them are run again, from the one map that they are made of.
    assert first.pages == [steps[0]] and second.reads == {steps[0]}
    assert second.steps == steps[1:]
