"""What tests of bands share: a module run by bands, compared with the module itself."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.engine.executor import BandExecutor, allocate_result, collect_rows
from lowtide.streaming.engine.placement import memory_page_factory
from lowtide.streaming.engine.program import FullTensorOp, lower_to_rows
from lowtide.streaming.engine.segments import CutFinder, cut_segments
from lowtide.streaming.pages.page import MemoryPage, memory_order


def program_of(module, image, axis=2):
    return lower_to_rows(capture_graph(module.eval(), ModelInputs((image,), {0: axis})))


def results_by_bands(program, image, bands, parts=1, make_page=None):
    """The result tensors of ``program``, in the order in which its model returns them."""
    segments = cut_segments(program, CutFinder(program).cuts(parts))
    pages = make_page or memory_page_factory(program, image.device)
    (axis,) = program.graph.axes
    sweep = BandExecutor(program, segments, [bands] * len(segments), pages)
    made = list(sweep.run([MemoryPage.from_tensor(image, axis)]))
    for output in range(len(program.outputs)):
        starts = [first for one, first, _ in made if one == output]
        assert starts == sorted(starts)
    found = collect_rows(program, made, allocate_result(program, image.device))
    return [found[program.outputs.index(one)] for one in program.graph.outputs]


def by_bands(program, image, bands, parts=1, make_page=None):
    """The only result of ``program``."""
    (found,) = results_by_bands(program, image, bands, parts, make_page)
    return found


class Branches(nn.Module):
    """Functions and layers by name, each between the first convolution and one of its own.

    One capture is enough for all of them.
    """

    def __init__(self, functions, channels=8, made=None):
        super().__init__()
        torch.manual_seed(0)
        made = made or {}
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.last = nn.ModuleList(
            nn.Conv2d(made.get(name, channels), 3, 3, padding=1) for name in functions
        )
        self.functions = functions
        self.inside = nn.ModuleList(one for one in functions.values() if isinstance(one, nn.Module))

    def forward(self, image):
        x = self.first(image)
        pairs = zip(self.functions.items(), self.last, strict=True)
        return {name: last(function(x)) for (name, function), last in pairs}


def check_parity(module, image, *, axis=2, bands=(1, 2, 3, 7), parts=(1, 4), share=1e-11, whole=()):
    """Every number of bands gives what the module gives, to a share of its largest number.

    ``whole`` names operators that may be run on whole maps; all others must run by bands.
    """
    before = image.clone()
    with torch.no_grad():
        result = module.eval()(image.clone())
    names = list(result) if isinstance(result, dict) else [""]
    expected = list(result.values()) if isinstance(result, dict) else [result]
    program = program_of(module, image, axis)
    unsupported = [
        str(step.node.target)
        for index, step in program.steps.items()
        if isinstance(step, FullTensorOp) and index in program.unsupported
    ]
    assert set(unsupported) <= set(whole), unsupported
    for number in bands:
        for cut in parts:
            found = results_by_bands(program, image, number, cut)
            for name, one, other in zip(names, found, expected, strict=True):
                assert one.shape == other.shape
                error = (one - other).abs().max().item()
                allowed = share * max(1.0, other.abs().max().item())
                assert error <= allowed, (name, number, cut, error)
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
