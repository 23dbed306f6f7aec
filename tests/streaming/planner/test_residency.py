"""How long pages live, what they occupy meanwhile, and which of them stay in memory."""

import os
import random

import pytest
import torch
from torch import nn

from lowtide.core import scratch
from lowtide.streaming.engine.executor import BandExecutor, collect_rows
from lowtide.streaming.engine.placement import page_factory
from lowtide.streaming.engine.segments import CutFinder, cut_segments
from lowtide.streaming.pages import spilled_page
from lowtide.streaming.pages.page import MemoryPage
from lowtide.streaming.pages.spilled_page import DiskPage
from lowtide.streaming.planner.layout_cost import (
    PageLifetime,
    PageOccupancy,
    page_lifetimes,
    select_resident_pages,
)
from lowtide.streaming.planner.layout_search import draft_layouts
from support.band_runs import program_of


def drawn(draw, count):
    pages = {}
    for index in range(draw.randint(1, 20)):
        first = draw.randrange(count - 1)
        last = draw.randint(first + 1, count)
        pages[index] = PageLifetime(draw.randint(1, 100), first, last, draw.randint(1, 4))
    return pages


def by_definition(pages, count):
    """The most at any moment: while a segment runs, what it makes comes as what it ends goes."""
    most = [0] * count
    for place in range(count):
        before = sum(one.size for one in pages if one.first < place <= one.last)
        after = sum(one.size for one in pages if one.first <= place < one.last)
        most[place] = max(before, after)
    return most


def test_pages_occupy_memory_from_where_they_are_made_until_they_were_read():
    count = 9
    for seed in range(20):
        pages = list(drawn(random.Random(seed), count).values())
        occupied = PageOccupancy(count, pages)
        assert [occupied.bytes_at(place) for place in range(count)] == by_definition(pages, count)
        assert occupied.peak_bytes == max(by_definition(pages, count))


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_resident_pages_fit(share):
    count = 9
    for seed in range(20):
        pages = drawn(random.Random(seed), count)
        limit = int(share * PageOccupancy(count, pages.values()).peak_bytes)
        found = select_resident_pages(pages, count, limit)
        assert max(by_definition([pages[one] for one in found], count)) <= limit
        assert share < 1.0 or found == pages.keys()


def test_pages_that_are_read_soon_stay_resident_first():
    pages = {
        0: PageLifetime(10, 0, 8, 1),
        1: PageLifetime(10, 1, 2, 1),
        2: PageLifetime(10, 3, 5, 2),
    }
    assert select_resident_pages(pages, 9, 10) == {1, 2}
    assert select_resident_pages(pages, 9, 20) == {0, 1, 2}
    assert select_resident_pages(pages, 9, 9) == set()


def test_lives_are_those_of_the_segments():
    layers = []
    for _ in range(3):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()]
    image = torch.rand(1, 4, 32, 24)
    program = program_of(nn.Sequential(*layers, nn.Conv2d(4, 4, 1)), image)
    segments = cut_segments(program, CutFinder(program).cuts(1))
    found = page_lifetimes(program, segments)
    assert found.keys() == {index for part in segments for index in part.pages}
    for index, life in found.items():
        assert life.size == image.nbytes
        assert index in segments[life.first].pages
        assert index in segments[life.last].reads


def test_shares_are_drafted_between_all_in_memory_and_none():
    layers = []
    for _ in range(4):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)]
    program = program_of(nn.Sequential(*layers), torch.rand(1, 4, 64, 24))
    drafts = [
        one
        for one in draft_layouts(program, (1 << 14,), ("memory", "disk"), (0.5, 1.0))
        if one.bands == next(iter(draft_layouts(program, (1 << 14,)))).bands
    ]
    inside = next(one for one in drafts if one.placement == "memory")
    outside = next(one for one in drafts if one.placement == "disk" and not one.resident)
    assert inside.spilled_peak_bytes == 0
    assert outside.spilled_peak_bytes == outside.pages_bytes == inside.pages_bytes
    for one in drafts:
        if one.resident:
            assert outside.peak_bytes <= one.peak_bytes <= inside.peak_bytes
            assert one.spilled_bytes < outside.spilled_bytes
            assert one.overhead_seconds < outside.overhead_seconds
    assert any(one.resident for one in drafts)


def test_files_take_what_is_said_of_them(monkeypatch):
    for module in (scratch, spilled_page):
        monkeypatch.setattr(
            module, "BLOCK_BYTES", 256
        )  # of which a page has many, and none in part
    written, most = {}, 0

    class Watched(DiskPage):
        def _write_bytes(self, at, run):
            nonlocal most
            super()._write_bytes(at, run)
            written[self] = written.get(self, 0) + run.numel()
            most = max(most, sum(written.values()))

        def close(self):
            super().close()
            written.pop(self, None)

    layers = []
    for _ in range(8):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)]
    module, image = nn.Sequential(*layers), torch.rand(1, 4, 64, 24)
    program = program_of(module, image)
    for layout in draft_layouts(program, (1 << 14,), ("disk",), (0.5,)):
        most, space = 0, scratch.ScratchSpace()
        pages = page_factory(
            program, "disk", image.device, space, resident=layout.resident, disk_page_class=Watched
        )
        sweep = BandExecutor(program, layout.segments, layout.bands, pages)
        with torch.no_grad():
            (found,) = collect_rows(program, sweep.run([MemoryPage.from_tensor(image, 2)]))
            torch.testing.assert_close(found, module(image), rtol=0, atol=5e-6)
        assert most == layout.disk_peak_bytes
        assert os.fstat(space.blocks()._file._file.fileno()).st_size == most
        assert layout.disk_peak_bytes < layout.spilled_bytes or not layout.spilled_bytes
        assert not written
