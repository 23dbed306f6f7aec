"""Attention modules that declare their rows are run by bands as they are."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.attention.spatial import HierarchicalAttention, LocalWindowAttention
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.streaming.capture.opaque_module import RowRegionOp
from lowtide.streaming.rules.rule import RowOp
from support.band_runs import check_parity, program_of


def net(attention, channels=8):
    torch.manual_seed(0)
    first, last = (
        nn.Conv2d(given, made, 3, padding=1) for given, made in ((3, channels), (channels, 3))
    )
    return nn.Sequential(first, attention, last).eval().requires_grad_(False)


@pytest.mark.parametrize("form", ["halo", "blended"])
@pytest.mark.parametrize("boundary", ["mask", "shift", "zero", "reflect"])
def test_window_rules(form, boundary):
    size = (37, 29) if boundary in ("mask", "zero") else (70, 41)
    attention = LocalWindowAttention(8, heads=2, window=16, shared=4, form=form, boundary=boundary)
    module = net(attention).double()
    image = torch.rand(1, 3, *size, dtype=torch.float64)
    check_parity(module, image, bands=(1, 2, 5, 40), parts=(1, 3))


@pytest.mark.parametrize("phase", [(0, 0), (6, 0), (5, 7)])
def test_grids_that_begin_elsewhere(phase):
    attention = LocalWindowAttention(8, heads=1, window=16, shared=4, phase=phase)
    image = torch.rand(1, 3, 61, 33, dtype=torch.float64)
    check_parity(net(attention).double(), image, bands=(2, 7))


@pytest.mark.parametrize("tokens", [(64, 128), (64, 4096), (2048, 4096)])
def test_every_stage_of_hierarchical_attention(tokens):
    attention = HierarchicalAttention(
        8, heads=1, window=16, shared=4, full_tokens=tokens[0], chunked_tokens=tokens[1], chunk=64
    )
    image = torch.rand(1, 3, 43, 29, dtype=torch.float64)
    check_parity(net(attention).double(), image, bands=(1, 3))


def test_rows_of_windows_are_not_computed_twice(monkeypatch):
    attention = LocalWindowAttention(8, heads=1, window=16, shared=4)
    made, whole = [], LocalWindowAttention.forward_rows

    def counted(self, image, first, last, height):
        made.append((first, last))
        return whole(self, image, first, last, height)

    monkeypatch.setattr(LocalWindowAttention, "forward_rows", counted)
    module = net(attention)
    small = lowtide.stream(module, budget="19MiB")
    image = torch.rand(1, 3, 240, 400)
    small(image)
    made.clear()
    small(image)
    assert len(made) > 2
    assert all(first % 12 == 0 for first, _ in made)
    assert sum(last - first for first, last in made) == 240


def test_the_steps_are_row_operators_with_the_module_inside():
    module = net(LocalWindowAttention(8, heads=1))
    program = program_of(module, torch.rand(1, 3, 90, 40))
    (block,) = (
        index
        for index, node in enumerate(program.graph.nodes)
        if isinstance(node.target, RowRegionOp)
    )
    step = program.steps[block]
    assert isinstance(step, RowOp)
    assert step.rows.grain == 24
    assert step.input_spans((24, 48)) == ([(20, 52)],)
    assert not program.unsupported


def test_its_memory_is_predicted():
    module = net(LocalWindowAttention(32), channels=32)
    image = torch.rand(1, 3, 384, 512)
    whole = live_peak_bytes(lambda: module(image))
    small = lowtide.stream(module, budget=whole // 2)
    predicted = small.prepare(image).layout.peak_bytes
    small(image)
    taken = live_peak_bytes(lambda: small(image))
    assert taken < 0.6 * whole
    assert 0.8 * predicted <= taken <= 1.05 * predicted


def test_the_workspace_of_equal_modules_is_measured_once(monkeypatch):
    measured = []

    def noted(run):
        measured.append(run)
        return live_peak_bytes(run)

    monkeypatch.setattr("lowtide.streaming.capture.opaque_module.live_peak_bytes", noted)
    alike, other = [
        [LocalWindowAttention(8, heads=1, window=16, shared=4, form=form) for _ in range(3)]
        for form in ("halo", "blended")
    ]
    program = program_of(net(nn.Sequential(*alike, *other)), torch.rand(1, 3, 61, 33))
    blocks = [node.target for node in program.graph.nodes if isinstance(node.target, RowRegionOp)]
    assert len(blocks) == 6
    assert len(measured) == 2
    halo, blended = (
        {one.workspace_bytes(8, 61, 33) for one in blocks[at : at + 3]} for at in (0, 3)
    )
    assert len(halo) == len(blended) == 1 and halo != blended
