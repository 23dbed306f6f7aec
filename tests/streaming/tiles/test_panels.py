"""Wide images in panels: equal to the whole, in memory that does not grow with the width."""

import errno
from dataclasses import replace

import numpy as np
import pytest
import torch

from lowtide import Cancelled, InputError, OutputError
from lowtide.core import scratch
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.planner.band_candidates import BandPlanner
from lowtide.streaming.planner.model_facts import ModelGeometry
from lowtide.streaming.planner.program_cache import StreamPlannerCache
from lowtide.streaming.tiles.run_rows import COPY_ROWS, ScratchRowFile, panel_columns
from lowtide.streaming.tiles.runner import execute_plan
from support.plan_runs import assert_same, run_plan, with_dry_run
from support.toy_models import (
    ArraySink,
    ArraySource,
    Strided,
    conv_net,
    costs,
    image_adapter,
    image_task,
    network,
    pictures,
)

picture = pictures(seed=3)
REACH = 4  # of `conv_net`


def priced(net, size, bands=3, sample="uint8", align=1, reach=REACH, panel=None):
    height, width = size
    padded = -(-height // align) * align, -(-width // align) * align
    shape = ModelGeometry(net.scale, net.in_channels, net.out_channels, align)
    array = np.empty((height, width, bands), sample)
    picture = image_task(array, padded, net.in_channels)
    return BandPlanner(costs(reach), shape, picture, StreamPlannerCache(net), panel)


def in_panels(net, array, panel, **more):
    height, width, bands = array.shape
    pricing = priced(net, (height, width), bands, str(array.dtype), panel=panel, **more)
    plan = pricing.candidates()[0]
    return plan, pricing.programs.program(*plan.network_size)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("sample", "bands"), [("uint8", 3), ("uint8", 4), ("uint16", 2), ("float32", 1)]
)
def test_every_kind_of_image_equals_the_whole(tmp_path, sample, bands):
    net, array = network(conv_net()), picture(23, 67, bands, sample)
    plan, program = in_panels(net, array, 20)
    assert plan.strategy.panels == len(panel_columns(plan.image, plan.strategy).starts) > 4
    assert_same(net, array, plan, program, scratch=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.grid(3)
@pytest.mark.parametrize("width", [21, 64, 97])
def test_any_width(width):
    net, array = network(conv_net()), picture(11, width, 3)
    plan, program = in_panels(net, array, 20)
    assert_same(net, array, plan, program)


@pytest.mark.grid(4)
@pytest.mark.parametrize(("height", "width"), [(5, 65), (61, 79), (64, 128), (30, 90)])
def test_padding_is_that_of_the_whole(height, width):
    net, array = network(Strided().eval(), scale=1), picture(height, width, 3)
    plan, program = in_panels(net, array, 32, align=4, reach=8)
    assert plan.strategy.panels > 1
    assert_same(net, array, plan, program)


def test_an_opacity_keeps_its_edges_where_a_model_reaches_nothing():
    pointwise = torch.nn.Conv2d(3, 3, 1).eval().requires_grad_(False)
    net, array = network(pointwise, scale=1), picture(12, 50, 4)
    array[:, :, 3] = np.where(np.arange(50) < 25, 0, 255)
    plan, program = in_panels(net, array, 10, reach=0)
    assert_same(net, array, plan, program)


def test_progress_counts_rows_of_the_image():
    net, array = network(conv_net()), picture(40, 60, 3)
    plan, program = in_panels(net, array, 20)
    told = []
    run_plan(net, array, plan, program, on_rows=told.append)
    assert sum(told) == 80
    assert all(rows > 0 for rows in told)


def test_stops_between_bands(tmp_path):
    net, array = network(conv_net()), picture(40, 60, 3)
    plan, program = in_panels(net, array, 20)
    asked, source, sink = [], ArraySource(array), ArraySink()

    def cancel():
        asked.append(None)
        return len(asked) == 6

    with pytest.raises(Cancelled):
        how = {"program": program, "cancel": cancel, "scratch": tmp_path}
        execute_plan(net, image_adapter(net, array), source, sink, plan, **how)
    assert not sink.parts
    assert not list(tmp_path.iterdir())


def test_a_file_that_ends_early_is_named_as_such():
    net, array = network(conv_net()), picture(40, 60, 3)
    plan, program = in_panels(net, array, 20)
    source = ArraySource(array)
    source.array = array[:17]
    with pytest.raises(InputError, match="ended after 17 of 40 rows"):
        execute_plan(net, image_adapter(net, array), source, ArraySink(), plan, program=program)


def test_pages_of_all_panels_share_a_file(tmp_path, monkeypatch):
    net, array = network(conv_net()), picture(40, 60, 3)
    plan, program = in_panels(net, array, 20)
    cuts = (list(program.steps)[len(program.steps) // 2],)
    bands = (3,) * len(cut_segments(program, cuts))
    plan = plan.with_strategy(cuts=cuts, bands=bands, pages="disk")
    made, create = [], scratch.ScratchBlockPool.__init__
    monkeypatch.setattr(
        scratch.ScratchBlockPool,
        "__init__",
        lambda self, at: (made.append(at), create(self, at))[1],
    )
    assert_same(net, array, plan, program, scratch=tmp_path)
    assert made == [tmp_path]
    assert len(panel_columns(plan.image, plan.strategy).starts) > 1


def test_a_full_disk_is_said(monkeypatch):
    net, array = network(conv_net()), picture(40, 60, 3)
    plan, program = in_panels(net, array, 20)

    class Full:
        def seek(self, at):
            pass

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr(scratch.tempfile, "TemporaryFile", lambda **_: Full())
    with pytest.raises(OutputError, match="the disk is full"):
        run_plan(net, array, plan, program)


def test_rows_come_back_from_a_file_as_they_went():
    rows = picture(30, 7, 3, "uint16")
    with ScratchRowFile(rows.shape, rows.dtype, None) as file:
        file.write(0, rows[:13])
        file.write(13, rows[13:, ::-1][:, ::-1])
        found = [file.read(0, 11), file.read(11, 22), file.read(22, 30)]
    np.testing.assert_array_equal(np.concatenate(found), rows)


def panels_of(pricing):
    return {plan.strategy.panels for plan in pricing.candidates()}


def test_wide_images_of_local_models_are_priced_in_panels():
    net = network(conv_net(features=16))
    for width, expected in ((4000, False), (9000, True)):
        assert (panels_of(priced(net, (64, width))) > {1}) == expected
    assert panels_of(priced(net, (64, 9000), reach=None)) == {1}
    assert panels_of(priced(net, (64, 9000), reach=200)) == {1}


def test_panels_take_what_their_width_takes_and_disk_for_the_rest():
    net = network(conv_net(features=16))
    size = 3000, 9000
    pricing = priced(net, size)
    told = with_dry_run(
        pricing, next(plan for plan in pricing.candidates() if plan.strategy.panels > 1)
    )
    panel = told.strategy.panel_width
    narrow = priced(net, (3000, panel)).candidates()
    assert told.strategy.bands in {plan.strategy.bands for plan in narrow}
    disk = told.bytes_at("disk")
    assert 3 * 3000 * 9000 * 5 < disk < 1.02 * 3 * 3000 * 9000 * 5
    assert "panels" in told.title
    assert told.network_size == (3000, panel)


@pytest.mark.slow
def test_several_ways_are_told_apart():
    net = network(conv_net(features=16))
    pricing = priced(net, (512, 9000))
    for plan in pricing.candidates():
        assert with_dry_run(pricing, plan).strategy == plan.strategy


def test_files_are_priced_beyond_what_bands_take_between():
    """They are read before and written after the panels; of a card's memory they get none."""
    net = network(conv_net())

    def formats(codecs, device="cpu"):
        pricing = priced(net, (40, 90), panel=20)
        picture = replace(pricing.image_task, codec_bytes=codecs)
        known = pricing.costs.model_copy(update={"device": device})
        plan = replace(pricing, image_task=picture, costs=known).candidates()[0]
        (found,) = [line for line in plan.ledger if line.name == "file formats"]
        bands = [line for line in plan.ledger if line.name in ("bands and pages", "allocator")]
        return found, sum(line.value for line in bands), sum(line.upper for line in bands)

    moved = 90 * 3 * (1 + net.scale) * 2 * COPY_ROWS
    small, large = ((1000, 2000), (500, 900)), ((10**9, 2 * 10**9), (500, 900))
    assert (formats(small)[0].value, formats(small)[0].upper) == (0, 0)
    found, expected, most = formats(large)
    assert found.value == 10**9 + moved - expected
    assert found.upper == 2 * 10**9 + moved - most
    beside, _, _ = formats(small, "cuda")
    assert (beside.value, beside.upper) == (1000 + moved, 2000 + moved)
