"""What the tests of bands share: a module run by bands, beside the module itself."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F

from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.engine.cut_points import CutPoints
from lowtide.streaming.engine.executor import BandExecutor
from lowtide.streaming.engine.placement import memory_page_factory
from lowtide.streaming.engine.program import FullTensorOp, lower_to_rows
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.pages.page import MemoryPage, memory_order


def program_of(module, image):
    return lower_to_rows(capture(module.eval(), image))


def by_bands(program, image, bands, parts=1, make_page=None):
    """The result of ``program``, and the rows it came in."""
    segments = cut_segments(program, CutPoints(program).cuts(parts))
    pages = make_page or memory_page_factory(program, image.device)
    source = MemoryPage.from_tensor(image, 2)
    sweep = BandExecutor(program, segments, [bands] * len(segments), pages)
    found = list(sweep.run(source))
    starts = [first for first, _ in found]
    assert starts == sorted(starts)
    return torch.cat([rows for _, rows in found], program.rows[program.output].dim)


def check_parity(module, image, *, bands=(1, 2, 3, 7), parts=(1, 4), share=1e-11, whole=()):
    """Every number of bands gives what the module gives, to a share of its largest number.

    ``whole`` names operators that may be run on whole maps; all others must run by bands.
    """
    before = image.clone()
    with torch.no_grad():
        expected = module.eval()(image.clone())
    program = program_of(module, image)
    names = [
        str(step.node.target)
        for index, step in program.steps.items()
        if isinstance(step, FullTensorOp) and index in program.unsupported
    ]
    assert set(names) <= set(whole), names
    for number in bands:
        for cut in parts:
            found = by_bands(program, image, number, cut)
            assert found.shape == expected.shape
            apart = (found - expected).abs().max().item()
            assert apart <= share * max(1.0, expected.abs().max().item()), (number, cut, apart)
    assert torch.equal(image, before)


def convolved_orders(run):
    """By weight in which orders of memory ``run`` gives convolutions their input."""
    seen, plain = {}, F.conv2d

    def noted(given, weight, *rest, **more):
        sides = [place for place, side in enumerate(given.shape) if side > 1]
        order = tuple(place for place in memory_order(given) if place in sides)
        seen.setdefault(weight.data_ptr(), set()).add(order)
        return plain(given, weight, *rest, **more)

    with mock.patch.object(F, "conv2d", noted):
        run()
    return seen
