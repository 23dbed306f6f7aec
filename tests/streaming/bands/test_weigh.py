"""What a glance at a segment tells of its bands."""

from __future__ import annotations

import torch
from running import program_of
from torch import nn

from lowtide.streaming.bands.segments import segment
from lowtide.streaming.bands.weigh import glance

# Of the image and of every result: 4 channels, 16 columns.
ROWS, ROW_BYTES = 64, 4 * 16 * 4


def test_low_bands_copy_what_two_of_them_see():
    # Bands of one row put three rows together for every convolution, the whole is read once.
    convolutions = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)))
    program = program_of(convolutions, torch.rand(1, 4, ROWS, 16))
    (part,) = segment(program, (), 0)
    copied = {bands: glance(program, part, bands)[2] for bands in (1, 4, 16, ROWS)}
    assert copied[1] == ROWS * ROW_BYTES
    assert copied[1] < copied[4] < copied[16] < copied[ROWS]
    assert 0.7 < copied[ROWS] / (5 * 3 * ROWS * ROW_BYTES) < 1.3
