"""DRCT's groups: the end of a block and the layer behind it."""

import copy

import pytest
import torch

from lowtide.models.optimized import dense_group
from lowtide.models.optimized.replace import replace_modules
from lowtide.models.optimized.token_linear import OptimizedMlp
from support.window_transformers import network


def _watched(monkeypatch):
    """Shapes of the weights of each linear product, in order."""
    made, product = [], dense_group.onednn_linear_any_layout

    def watched(x, weight, *more, **named):
        made.append(tuple(weight.shape))
        return product(x, weight, *more, **named)

    monkeypatch.setattr(dense_group, "onednn_linear_any_layout", watched)
    return made


@pytest.mark.parametrize("size", [(8, 8), (24, 40)])
def test_a_blocks_last_layer_and_the_one_behind_it_are_one(size, monkeypatch):
    plain = network("DRCT")
    fast = copy.deepcopy(plain)
    replace_modules(fast)
    made, image = _watched(monkeypatch), torch.rand(1, 3, *size)
    with torch.inference_mode():
        found, expected = fast(image), plain(image)
        exact = plain.double()(image.double())
    # Of the first group's first three blocks and last two: gc or dim of twice or once the channels.
    assert made[:5] == [(12, 72), (12, 96), (12, 120), (12, 72), (36, 84)]
    assert len(made) == 10
    ours, theirs = ((one - exact).square().mean().sqrt() for one in (found, expected))
    assert ours <= 1.2 * theirs


def test_layers_without_a_bias_are_one_too(monkeypatch):
    plain = network("DRCT")
    fast = copy.deepcopy(plain)
    for net in (plain, fast):
        for group in net.layers:
            group.swin1.mlp.fc2.bias = group.adjust2.bias = None
            group.swin3.mlp.fc2.bias = group.adjust3.bias = None
    replace_modules(fast)
    made, image = _watched(monkeypatch), torch.rand(1, 3, 16, 24)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)
    assert len(made) == 10


def test_other_ends_stay_as_they_are(monkeypatch):
    plain = network("DRCT")
    fast = copy.deepcopy(plain)
    for net in (plain, fast):
        net.layers[0].swin1.mlp.act = torch.nn.ReLU()
    replace_modules(fast)
    fast.layers[1].plain.swin2.plain.mlp.plain.fc2 = plain.layers[1].swin2.mlp.fc2
    made, image = _watched(monkeypatch), torch.rand(1, 3, 16, 24)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)
        assert len(made) == 8
        made.clear()
        fast.bfloat16()(image.bfloat16())
    assert not made


def test_an_mlp_is_known_unless_it_trains():
    parts = [part for part in _adapted().modules() if isinstance(part, OptimizedMlp)]
    assert parts and all(part.is_known() for part in parts)
    parts[0].train()
    parts[0].plain.train()
    assert not parts[0].is_known()


def _adapted():
    net = network("DRCT")
    replace_modules(net)
    return net
