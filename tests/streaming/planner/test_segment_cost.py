"""Rough costs of a segment's bands, and the bytes that may stay in the heap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.planner.dry_run import dry_run
from lowtide.streaming.planner.layout_cost import estimate_segment
from lowtide.streaming.planner.layout_search import draft_layouts
from support.band_runs import program_of

# Of the image and of every result: 4 channels, 16 columns.
ROWS, ROW_BYTES = 64, 4 * 16 * 4


def test_low_bands_copy_what_two_of_them_see():
    # Bands of one row put three rows together for every convolution, the whole is read once.
    convolutions = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)))
    program = program_of(convolutions, torch.rand(1, 4, ROWS, 16))
    (part,) = cut_segments(program)
    copied = {bands: estimate_segment(program, part, bands)[2] for bands in (1, 4, 16, ROWS)}
    assert copied[1] == ROWS * ROW_BYTES
    assert copied[1] < copied[4] < copied[16] < copied[ROWS]
    assert 0.7 < copied[ROWS] / (5 * 3 * ROWS * ROW_BYTES) < 1.3


@pytest.mark.parametrize("below", [0, 150_000, 1 << 40])
def test_a_heap_keeps_small_blocks_only(monkeypatch, tmp_path, below):
    """What lives at the peak in blocks that are not given back when they are freed, weights and
    image left out; of operators without scratch, which differs by processor."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr("lowtide.streaming.planner.dry_run.MMAP_THRESHOLD_BYTES", below)
    net = nn.Sequential(nn.Upsample(scale_factor=4), nn.AvgPool2d(4))
    program = program_of(net, torch.rand(1, 3, 64, 96))
    layout = next(iter(draft_layouts(program, (1 << 40,), ("memory",))))
    assert layout.bands == (1,)
    rows = {row.name: row.value for row in dry_run(program, layout, whole_image=True).rows}
    picture, maps = 4 * 3 * 64 * 96, 4 * 3 * 256 * 384
    assert rows["live activations"] == maps + picture
    assert rows["allocator"] == {0: 0, 150_000: picture, 1 << 40: maps + picture}[below]


def test_assumed_workspaces_are_not_cached(monkeypatch, tmp_path):
    """Where little memory is free operators are taken at their bounds; that passes."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    net = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.Conv2d(16, 3, 5, padding=2))
    program = program_of(net, torch.rand(1, 3, 64, 96))
    layout = next(iter(draft_layouts(program, (1 << 40,), ("memory",))))
    free = "lowtide.memory.prediction.cpu.available_host_bytes"
    with monkeypatch.context() as scarce:
        scarce.setattr(free, lambda: 0)
        assumed = dry_run(program, layout, whole_image=True)
    measured = dry_run(program, layout, whole_image=True)
    assert measured.peak_bytes < assumed.peak_bytes
    with monkeypatch.context() as scarce:
        scarce.setattr(free, lambda: 0)
        assert dry_run(program, layout, whole_image=True) == measured
