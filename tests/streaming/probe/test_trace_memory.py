"""Memory of tiles predicted from traces: exact where possible, else within bounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.prediction import cpu
from lowtide.memory.prediction.operator_costs import operand_bytes
from lowtide.streaming.planner.ledger_rows import LIVE_ROW
from lowtide.streaming.planner.model_facts import ImageTask, ModelGeometry, PlanOverrides
from lowtide.streaming.planner.tile_candidates import tile_candidates
from lowtide.streaming.probe import trace_memory
from lowtide.streaming.probe.measure_costs import probe_costs
from lowtide.streaming.probe.trace_memory import TileTracer, padding_multiple, trace_points
from lowtide.streaming.tiles.network import RunnableNetwork
from support.toy_models import conv_net, network
from support.toy_models import costs as toy_costs


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


def test_points_are_what_runs_hold() -> None:
    module = conv_net().eval()
    points = trace_points(network(module), align=1, minimum=0)
    for point in points[:3]:
        side = round(point.pixels**0.5)
        with torch.inference_mode():
            image = torch.rand(1, 3, side, side)
            inside = live_peak_bytes(lambda image=image: module(image))
        assert point.peak_bytes == inside + image.nbytes


def test_points_count_bytes_in_small_blocks() -> None:
    small, *_, large = trace_points(network(conv_net().eval()), align=1, minimum=0)
    alive = small.reused_blocks[-1]
    assert 0 < alive.at_run_peak <= alive.max_live <= small.peak_bytes
    counts = [one.max_live for one in large.reused_blocks]
    assert counts == sorted(counts)
    assert counts[0] < large.peak_bytes


def test_no_operator_beyond_the_limit_is_run(monkeypatch) -> None:
    run, limit = [], 4 << 20
    measure = cpu.measure_operator

    def observed(call):
        run.append(operand_bytes(call))
        return measure(call)

    monkeypatch.setattr(cpu, "measure_operator", observed)
    net = RunnableNetwork(
        nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))), 1, 3, 3
    )
    points = trace_points(net, align=1, minimum=0, limit_bytes=limit)
    assert run
    assert max(run) <= limit
    assert points[-1].pixels == 2048**2
    assert points[-1].peak_bytes >= 2 * 3 * 4 * 2048**2


class InParts(nn.Module):
    """Works through an image in squares of one size, as attention does through windows."""

    def forward(self, x):
        result = torch.empty_like(x)
        for top in range(0, x.shape[2], 32):
            for left in range(0, x.shape[3], 32):
                part = x[..., top : top + 32, left : left + 32]
                result[..., top : top + 32, left : left + 32] = part * 2
        return result


def test_a_network_of_ever_more_operators_is_not_followed_to_the_end(monkeypatch) -> None:
    parts = RunnableNetwork(InParts(), 1, 3, 3)
    monkeypatch.setattr(trace_memory, "_MANY_MORE", 1000)
    few = trace_points(parts, align=1, minimum=0)
    assert [round(point.pixels**0.5) for point in few] == [64, 128, 256, 512]
    # What lies beyond goes on as it was: the image, the result and a part.
    costs = toy_costs(None).model_copy(update={"traced_points": few})
    assert costs.activation_bytes(2048**2) == pytest.approx(2 * 12 * 2048**2, rel=0.01)


@pytest.mark.slow
def test_nothing_is_kept_of_shapes_that_were_traced() -> None:
    probe_costs(network(conv_net()), sha256="0", weight_bytes=0, align=1, minimum=0)
    assert not FakeTensorMode.cache


def test_an_untraceable_network_has_no_points() -> None:
    class Deciding(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    assert trace_points(RunnableNetwork(Deciding(), 1, 3, 3), align=1, minimum=0) == ()
    assert trace_points(RunnableNetwork(lambda x: x, 1, 3, 3), align=1, minimum=0) == ()


class Padding(nn.Module):
    """A convolution behind padding to multiples of ``grain``, as window transformers have it."""

    def __init__(self, grain: int) -> None:
        super().__init__()
        self.conv, self.grain = nn.Conv2d(3, 8, 3, padding=1), grain

    def forward(self, x):
        height, width = x.shape[-2:]
        padded = nn.functional.pad(x, (0, -width % self.grain, 0, -height % self.grain), "reflect")
        return self.conv(padded)[..., :height, :width]


@pytest.mark.parametrize(("grain", "align"), [(1, 1), (2, 1), (8, 1), (64, 1), (24, 12), (16, 16)])
def test_the_grain_is_what_a_network_pads_to(grain: int, align: int) -> None:
    assert padding_multiple(RunnableNetwork(Padding(grain), 1, 3, 8), align=align) == max(
        grain, align
    )


def test_traces_that_share_weights_are_those_of_each_alone() -> None:
    net = RunnableNetwork(nn.Sequential(Padding(8), nn.BatchNorm2d(8)).eval(), 1, 3, 8)
    traces = TileTracer(net)
    for side in (24, 40, 24):
        shared, alone = traces.trace(side, side), TileTracer(net).trace(side, side)
        assert (shared.ops, shared.events) == (alone.ops, alone.events)
        assert (shared.initial, shared.kinds) == (alone.initial, alone.kinds)


def test_points_up_to_an_image_are_the_first_of_all() -> None:
    net = network(conv_net().eval())
    every = trace_points(net, align=1, minimum=0)
    for pixels, count in ((100, 2), (1 << 14, 2), ((1 << 14) + 1, 3), (1 << 30, len(every))):
        assert trace_points(net, align=1, minimum=0, up_to=pixels) == every[:count]


def test_where_nothing_can_be_traced_the_grain_is_the_grid() -> None:
    assert padding_multiple(RunnableNetwork(lambda x: x, 1, 3, 3), align=4) == 4


def test_the_estimate_counts_pixels_that_a_network_pads() -> None:
    costs = toy_costs(None).model_copy(update={"padding_multiple": 64})
    picture = ImageTask((300, 500, 3), (300, 500))
    plans = tile_candidates(costs, ModelGeometry(1, 3, 3, align=64), picture, PlanOverrides())
    whole = next(plan for plan in plans if plan.strategy.name == "whole")
    (live,) = [row for row in whole.ledger if row.name == LIVE_ROW]
    assert live.value == costs.activation_bytes(320 * 512)
    for height, width in (plan.network_size for plan in plans):
        assert height % 64 == 0 or height == 300
        assert width % 64 == 0 or width == 500


def test_many_scores_are_not_computed_only_to_be_measured():
    """A network in a file, which cannot be traced, with attention over its whole map."""
    seen = []

    def attend(image):
        seen.append(image.shape[-1])
        tokens = image[..., ::4, ::4].flatten(2).transpose(1, 2)
        scores = (tokens @ tokens.transpose(1, 2)).softmax(-1)
        return image + (scores @ tokens).mean()

    spec = network(attend, scale=1)
    costs, complete = probe_costs(spec, sha256="0", weight_bytes=0, align=1, minimum=0)
    assert complete
    assert max(seen) == 256
    # What was not run is predicted: the scores and their softmax at 512×512.
    assert costs.activation_bytes(512 * 512) > 2 * 4 * (128 * 128) ** 2 * 0.8
