"""What tiles hold, told from traces: exact where it can be, within limits where it is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import conv_net, network

from lowtide.memory.estimating import scratch
from lowtide.memory.estimating.scratch import operand_bytes
from lowtide.memory.measuring.live import live_peak_bytes
from lowtide.streaming.step import Network
from lowtide.streaming.tracing import trace_points


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


def test_no_operator_beyond_the_limit_is_run(monkeypatch) -> None:
    run, limit = [], 4 << 20
    measure = scratch._asked

    def asked(call):
        run.append(operand_bytes(call))
        return measure(call)

    monkeypatch.setattr(scratch, "_asked", asked)
    net = Network(nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))), 1, 3, 3)
    points = trace_points(net, align=1, minimum=0, limit_bytes=limit)
    assert run
    assert max(run) <= limit
    assert points[-1].pixels == 2048**2
    assert points[-1].peak_bytes >= 2 * 3 * 4 * 2048**2


def test_what_cannot_be_traced_has_no_points() -> None:
    class Deciding(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    assert trace_points(Network(Deciding(), 1, 3, 3), align=1, minimum=0) == ()
    assert trace_points(Network(lambda x: x, 1, 3, 3), align=1, minimum=0) == ()
