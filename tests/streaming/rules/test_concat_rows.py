"""Rows written adjacent to those of the previous band, with which they are read."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from lowtide.streaming.pages import page
from lowtide.streaming.pages.page import MemoryPage
from lowtide.streaming.rules.in_place import STRIDED_OUT_OPS
from lowtide.streaming.rules.rule import op_name
from support.band_runs import Branches, by_bands, check_parity, program_of
from support.stream_models import Between

FUNCTIONS = {
    "add": lambda x: x + x.mean(1, keepdim=True),
    "sub": lambda x: x - x.mean(1, keepdim=True),
    "mul": lambda x: x * x.mean(1, keepdim=True),
    "div": lambda x: x / (2 + x.square().sum(1, True)),
    "silu": F.silu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "mish": F.mish,
}


def test_every_operator_with_an_out_argument_is_tried():
    assert FUNCTIONS.keys() == STRIDED_OUT_OPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operator_writes_to_out_and_nowhere_else(dtype):
    module = Branches(FUNCTIONS).to(dtype)
    program, tried = program_of(module, torch.rand(1, 3, 33, 21, dtype=dtype)), set()
    for index, step in program.steps.items():
        if getattr(step, "out_run", None) is None:
            continue
        shapes = [program.graph.nodes[one].meta.shape for one in step.inputs]
        pieces = [torch.randn(shape, dtype=dtype)[:, :, :7] for shape in shapes]
        expected = step.run((0, 7), pieces, [])
        room = torch.full((1, expected.shape[1], 12, 21), 7.0, dtype=dtype)
        step.out_run((0, 7), pieces, [], room.narrow(2, 3, 7))
        torch.testing.assert_close(room[:, :, 3:10], expected, rtol=1e-6, atol=1e-6)
        assert (room[:, :, :3] == 7).all()
        assert (room[:, :, 10:] == 7).all()
        tried.add(op_name(program.graph.nodes[index].target))
    assert tried == FUNCTIONS.keys()


def test_bands_give_what_the_module_gives():
    image = torch.rand(1, 3, 29, 13, dtype=torch.float64)
    check_parity(Branches(FUNCTIONS).double(), image)


def test_between_convolutions_nothing_is_put_together_by_a_copy():
    """Only rows of the image are, which has three channels."""
    module, image = Between(F.silu), torch.rand(1, 3, 60, 8, dtype=torch.float64)
    program, joined = program_of(module, image), page.concat_rows
    with mock.patch.object(page, "concat_rows", side_effect=joined) as later:
        by_bands(program, image, 6)
    widths = {call.args[0][0].shape[1] for call in later.call_args_list if len(call.args[0]) > 1}
    assert widths <= {3}


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_rows_behind_others_lie_with_them(form):
    page = MemoryPage(2, torch.device("cpu"))
    first = torch.rand(1, 4, 5, 3).contiguous(memory_format=form)
    page.write_without_copy(2, first)
    assert page.extend((8, 9)) is None
    room = page.extend((7, 10))
    assert room is not None
    room.fill_(5.0)
    found = page.read([(2, 10)])
    assert torch.equal(found, F.pad(first, (0, 0, 0, 3), value=5.0))
    assert found.is_contiguous(memory_format=form)


def test_nothing_is_put_behind_several_pieces():
    page = MemoryPage(2, torch.device("cpu"))
    page.write_without_copy(0, torch.rand(1, 1, 2, 3))
    page.write_without_copy(4, torch.rand(1, 1, 2, 3))
    assert page.extend((6, 8)) is None
