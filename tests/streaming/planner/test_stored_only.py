"""Planning by what another process has stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.streaming.planner.dry_run import dry_run
from lowtide.streaming.planner.layout_search import draft_layouts
from lowtide.streaming.stored_only import NotStoredError, stored_only
from support.band_runs import program_of


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A program that can be cut in several ways, and an empty cache."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    parts = [
        nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1))
        for _ in range(4)
    ]
    return program_of(nn.Sequential(*parts), torch.rand(1, 4, 64, 32))


def test_a_dry_run_that_is_not_stored_is_refused(program):
    layout = next(iter(draft_layouts(program, (1 << 40,), ("memory",))))
    with stored_only(), pytest.raises(NotStoredError):
        dry_run(program, layout, whole_image=True)
    known = dry_run(program, layout, whole_image=True)
    with stored_only():
        assert dry_run(program, layout, whole_image=True) == known
