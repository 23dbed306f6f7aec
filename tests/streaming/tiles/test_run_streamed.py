"""Strategy `streamed` from rows to rows: equal to the whole, whatever the image and the bands."""

import json
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from lowtide import Cancelled, LowtideError, ModelError, UsageError
from lowtide.memory.plan import Plan
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.engine.source_run import SourceRowBuffer, _Writer
from lowtide.streaming.planner.band_candidates import BandPlanner
from lowtide.streaming.planner.model_facts import ModelGeometry
from lowtide.streaming.planner.program_cache import StreamPlannerCache
from lowtide.streaming.tiles.runner import execute_plan
from support.plan_runs import assert_same, run_plan, with_dry_run
from support.toy_models import (
    GIB,
    ArraySink,
    ArraySource,
    Centered,
    Strided,
    conv_net,
    costs,
    image_adapter,
    image_task,
    network,
    pictures,
)

picture = pictures()
MIB = 1 << 20


class Kept(nn.Module):
    """With a map of norms that is there from the beginning to the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        sides = (3, 8, 8, 8, 3)
        self.convs = nn.ModuleList(
            nn.Conv2d(given, made, 3, padding=1) for given, made in pairwise(sides)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x):
        x = early = self.norms[0](self.convs[0](x))
        for norm, conv in zip(self.norms[1:], self.convs[1:3], strict=True):
            x = x + norm(conv(x))
        return self.convs[3](x * early).sigmoid()


class Twice(nn.Module):
    """Reads its input in two segments: before and after a statistic of all of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(3, 3, 5, padding=2)
        self.requires_grad_(False)

    def forward(self, x):
        return x + self.conv(x - x.mean((2, 3), keepdim=True)).sigmoid() * 0.1


def pricing(net, array, align=1):
    height, width, _ = array.shape
    padded = -(-height // align) * align, -(-width // align) * align
    shape = ModelGeometry(net.scale, net.in_channels, net.out_channels, align)
    picture = image_task(array, padded, net.in_channels)
    return BandPlanner(costs(None), shape, picture, StreamPlannerCache(net))


def banded(net, array, bands=5, align=1, pages="memory", cut=False):
    """A streamed plan with so many bands in each segment, and the program it belongs to."""
    priced = pricing(net, array, align)
    plan = priced.candidates()[0]
    program = priced.programs.program(*plan.image.padded_size)
    cuts = (list(program.steps)[len(program.steps) // 2],) if cut else ()
    number = len(cut_segments(program, cuts))
    return plan.with_strategy(cuts=cuts, bands=(bands,) * number, pages=pages), program


@pytest.mark.grid(4)
@pytest.mark.parametrize("sample", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize(("bands", "channels"), [(1, 1), (1, 3), (2, 1), (3, 3), (4, 3)])
def test_every_kind_of_image_equals_the_whole(sample, bands, channels):
    net = network(conv_net(channels=channels), channels=channels)
    array = picture(37, 30, bands, sample)
    plan, program = banded(net, array)
    assert_same(net, array, plan, program)


@pytest.mark.parametrize(
    ("bands", "pages"), [(1, "memory"), (7, "memory"), (2, "disk"), (40, "disk")]
)
def test_neither_bands_nor_pages_change_the_result(tmp_path, bands, pages):
    net, array = network(Twice().eval(), scale=1), picture(43, 29, 4)
    plan, program = banded(net, array, bands, pages=pages, cut=True)
    assert len(plan.strategy.bands) > 1
    assert_same(net, array, plan, program, scratch=tmp_path)
    assert not list(tmp_path.iterdir())


def test_some_pages_stay_in_memory(tmp_path):
    net, array = network(Kept().eval(), scale=1), picture(203, 150, 3)
    priced = pricing(net, array)
    plans = [plan for plan in priced.candidates() if plan.strategy.resident]
    assert plans
    for plan in plans[:3]:
        told = with_dry_run(priced, plan)
        assert 0 < plan.strategy.spilled_peak_bytes < plan.strategy.intermediate_peak_bytes
        assert " of them on disk" in plan.title
        assert Plan.model_validate_json(told.model_dump_json()) == told
        assert_same(net, array, told, priced.programs.program(*told.network_size), scratch=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("height", "width"), [(5, 3), (16, 50), (61, 75), (130, 129)])
def test_padding_is_that_of_the_whole(height, width):
    net, array = network(Strided().eval(), scale=1), picture(height, width, 3)
    plan, program = banded(net, array, 3, align=4)
    assert_same(net, array, plan, program)


def test_a_global_statistic_is_that_of_the_whole():
    net, array = network(Centered().eval(), scale=1), picture(70, 20, 3, "float32")
    plan, program = banded(net, array)
    assert_same(net, array, plan, program)


def test_channels_last():
    net = network(conv_net().to(memory_format=torch.channels_last), channels_last=True)
    array = picture(41, 33, 3)
    plan, program = banded(net, array)
    assert_same(net, array, plan, program)


def test_rows_of_the_file_are_let_go_as_soon_as_they_were_used(monkeypatch):
    net, array = network(conv_net()), picture(640, 20, 4)
    plan, program = banded(net, array, 40)
    most = []
    keep = SourceRowBuffer.retain

    def watched(self, reader, spans):
        keep(self, reader, spans)
        most.append(self.held_bytes)

    monkeypatch.setattr(SourceRowBuffer, "retain", watched)
    run_plan(net, array, plan, program)
    # A band of 16 rows, 16 read at once, and the reach of the network.
    assert max(most) <= 64 * 20 * 4


@pytest.mark.parametrize("channels", [3, 4])
def test_result_rows_are_let_go_before_the_next_band_is_computed(monkeypatch, channels):
    net, array = network(conv_net()), picture(50, 20, channels)
    plan, program = banded(net, array, 7)
    written, alive = [], []
    write = _Writer.write

    def noted(self, first, images):
        write(self, first, images)
        written.extend(weakref.ref(rows) for rows in images)

    monkeypatch.setattr(_Writer, "write", noted)
    run_plan(
        net,
        array,
        plan,
        program,
        before_step=lambda count: alive.append(sum(rows() is not None for rows in written)),
    )
    assert len(written) == 7 * plan.image.network_inputs
    assert not any(alive)


def test_progress_goes_on_before_the_first_row_is_written():
    net, array = network(Twice().eval(), scale=1), picture(50, 20, 3)
    plan, program = banded(net, array, 10)
    told, written = [], []

    class Watched(ArraySink):
        def write(self, first, values):
            written.append(sum(told))
            super().write(first, values)

    adapter, source = image_adapter(net, array), ArraySource(array)
    execute_plan(net, adapter, source, Watched(), plan, program=program, on_rows=told.append)
    assert sum(told) == 50
    assert all(rows > 0 for rows in told)
    assert written[0] > 5


def test_room_is_asked_for_before_each_operator():
    net, array = network(Twice().eval(), scale=1), picture(50, 20, 3)
    plan, program = banded(net, array, 10)
    asked = []
    run_plan(net, array, plan, program, before_step=asked.append)
    assert min(asked) > 0
    rows = 5 + 2 * 2  # of a band, and those that the convolution takes around it
    assert 5 * 20 * 3 * 4 <= max(asked) <= 10 * rows * 20 * 3 * 4


def test_stops_between_bands():
    net, array = network(conv_net()), picture(64, 20, 3)
    plan, program = banded(net, array, 8)
    asked = []

    def cancel():
        asked.append(None)
        return len(asked) == 3

    adapter, source, sink = image_adapter(net, array), ArraySource(array), ArraySink()
    with pytest.raises(Cancelled):
        execute_plan(net, adapter, source, sink, plan, program=program, cancel=cancel)
    assert 0 < sum(map(len, sink.parts)) < 128


def test_what_is_not_finite_is_no_picture():
    module = conv_net()
    with torch.no_grad():
        module[0].bias[0] = torch.inf
    net, array = network(module), picture(20, 20, 3)
    plan, program = banded(net, array, 2)
    with pytest.raises(LowtideError, match="not finite"):
        run_plan(net, array, plan, program)


def test_a_plan_read_from_json_gives_the_same_file():
    net, array = network(conv_net()), picture(40, 25, 3)
    plan, program = banded(net, array, 6)
    again = Plan.model_validate(json.loads(plan.model_dump_json()))
    first, second = (run_plan(net, array, one, program) for one in (plan, again))
    np.testing.assert_array_equal(first, second)


def test_a_plan_for_another_network_is_refused():
    array = picture(40, 25, 3)
    plan, _ = banded(network(conv_net()), array)
    other = network(conv_net(layers=4))
    program = StreamPlannerCache(other).program(40, 25)
    with pytest.raises(UsageError, match="another network"):
        run_plan(other, array, plan, program)


def test_candidates_trade_memory_for_time():
    net, array = network(conv_net(features=32)), picture(4096, 600, 3)
    priced = pricing(net, array)
    plans = sorted(priced.candidates(), key=lambda plan: plan.predicted_bytes)
    assert len(plans) > 2
    assert all(plan.accuracy == "exact" and plan.strategy.name == "streamed" for plan in plans)
    assert plans[0].seconds > plans[-1].seconds
    assert max(plans[0].strategy.bands) > max(plans[-1].strategy.bands)


def test_an_easy_budget_leaves_out_small_bands_but_not_where_memory_is_scarce():
    net, array = network(conv_net(features=32)), picture(4096, 600, 3)
    priced = pricing(net, array)
    least, *_, most = sorted(plan.upper_bytes for plan in priced.candidates())
    for ample, fewer in ((GIB, True), (least // 2, False)):
        other = replace(priced, image_task=replace(priced.image_task, ample_bytes=ample))
        bands = [plan.upper_bytes for plan in other.candidates()]
        assert (min(bands) > least, max(bands)) == (fewer, most)


def test_what_is_told_of_a_candidate_counts_every_image_of_a_tile():
    net = network(conv_net(features=32))
    told = {}
    for bands in (3, 4):
        array = picture(1024, 600, bands)
        priced = pricing(net, array)
        plan = priced.candidates()[0]
        exact = with_dry_run(priced, plan)
        told[bands] = next(row.value for row in exact.ledger if row.name == "live activations")
    assert told[4] == 2 * told[3]


def test_a_network_that_is_no_module_is_refused():
    with pytest.raises(ModelError, match="no graph"):
        StreamPlannerCache(network(lambda x: x, scale=1)).program(8, 8)


def test_a_network_that_draws_is_refused_each_time_with_its_reason():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    captures = []
    programs = StreamPlannerCache(network(Noisy().eval(), scale=1), lambda: captures.append(None))
    for _ in range(2):
        with pytest.raises(ModelError, match="random"):
            programs.program(16, 16)
    assert len(captures) == 1


def test_a_result_of_another_size_is_refused():
    programs = StreamPlannerCache(network(conv_net(scale=2), scale=3))
    with pytest.raises(ModelError, match="1×3×32×32"):
        programs.program(16, 16)


def test_each_order_in_memory_has_a_certificate_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    for last in (False, True):
        module = conv_net()
        if last:
            module = module.to(memory_format=torch.channels_last)
        programs = StreamPlannerCache(network(module, channels_last=last))
        assert programs.certificate(200, 136).error < 1e-5
    assert len(list(tmp_path.glob("plans/proof-*"))) == 2


class RemembersSizes(nn.Module):
    """Keeps the size of its last input, as many models do."""

    def __init__(self):
        super().__init__()
        self.layers = conv_net(scale=1)

    def forward(self, image):
        self.height, self.width = image.shape[2:]
        return self.layers(image)


def test_a_proof_holds_whatever_ran_before(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    module = RemembersSizes().eval()
    for before in (None, 24, 200):
        if before:
            module(torch.rand(1, 3, before, 136))
        StreamPlannerCache(network(module, scale=1)).certificate(200, 136)
    assert len(list(tmp_path.glob("plans/proof-*"))) == 1
