"""Equal buffers are one tensor, and nothing else changes."""

import torch
from torch import nn

from lowtide.models import Model
from lowtide.models.descriptor import ModelDescriptor, SizeRule
from lowtide.models.loaded_model import share_equal_buffers, weight_bytes
from support import window_transformers

SIDE = 256  # of buffers that are worth sharing, in half precision too


class Holder(nn.Module):
    def __init__(self, *buffers):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"b{number}", buffer)


def square(value=1.0):
    return torch.full((SIDE, SIDE), value)


def facts():
    return ModelDescriptor(
        name="n",
        architecture="a",
        purpose="SR",
        scale=1,
        in_channels=3,
        out_channels=3,
        size=SizeRule(0, 1, False),
        supports_half=True,
        supports_bfloat16=True,
        tiling="supported",
        tags=(),
        parameters=0,
        weight_bytes=0,
        sha256="",
        license=None,
        path=None,
    )


def test_masks_and_indices_of_a_window_transformer_are_held_once():
    net = window_transformers.network("SwinIR", img_size=96)
    image = torch.rand(1, 3, 96, 96)
    expected, before = net(image), weight_bytes(net)
    masks = {
        part.attn_mask.nbytes
        for part in net.modules()
        if hasattr(part, "shift_size") and part.shift_size
    }
    share_equal_buffers(net)
    blocks = [part for part in net.modules() if getattr(part, "shift_size", 0)]
    assert len(blocks) == 2 and blocks[0].attn_mask is blocks[1].attn_mask
    assert before - weight_bytes(net) == sum(masks) > 0
    assert torch.equal(net(image), expected)


def test_only_what_is_the_same_to_the_bit_is_shared():
    nan = square(float("nan"))
    alike, zero, minus = square(), square(0.0), square(-0.0)
    net = Holder(alike, square(), square(2), zero, minus, nan, nan.clone(), alike.double())
    share_equal_buffers(net)
    assert net.b0 is net.b1 and net.b5 is net.b6
    assert len({id(buffer) for buffer in net._buffers.values()}) == 6


def test_small_buffers_and_other_strides_are_not_shared():
    lying = torch.rand(SIDE, SIDE)
    net = Holder(lying, lying.t().contiguous().t(), torch.zeros(8), torch.zeros(8))
    share_equal_buffers(net)
    assert net.b0 is not net.b1 and net.b2 is not net.b3


def test_a_model_that_was_cast_shares_again():
    model = Model(Holder(square(), square()), facts())
    held = model.descriptor.weight_bytes
    assert held == 4 * SIDE * SIDE + 4
    assert model.to(dtype=torch.float16).descriptor.weight_bytes == held // 2
    assert model.module.b0 is model.module.b1
