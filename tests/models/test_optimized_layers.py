"""Layers over tokens and the heads of window attention."""

import copy
import importlib

import pytest
import torch

from lowtide.models.optimized.replace import replace_modules
from lowtide.models.optimized.token_linear import (
    OptimizedLinear,
    OptimizedPointwiseConv,
    linear_add,
)
from support.window_transformers import network


@pytest.mark.parametrize("family", ["SwinIR", "DRCT", "HAT"])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_of_windows_gives_the_same_values(family, bias):
    plain = network(family, embed_dim=60, qkv_bias=bias)  # heads of 30 channels, and of 54
    fast = copy.deepcopy(plain)
    replace_modules(fast)
    image = torch.rand(1, 3, 24, 40)
    with torch.inference_mode():
        torch.testing.assert_close(fast(image), plain(image), rtol=0, atol=2e-6)


def test_layers_add_what_is_there_already():
    x, there = torch.randn(7, 12), torch.randn(7, 12)
    layer = torch.nn.Linear(12, 12)
    kept = there.clone()
    for one in (OptimizedLinear(layer), layer, OptimizedLinear(layer.double())):
        given, more = (t.to(one.weight.dtype) for t in (x, there))
        with torch.inference_mode():
            torch.testing.assert_close(linear_add(one, given, more), one(given) + more)
    assert torch.equal(there, kept)


@pytest.mark.parametrize("between", [torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.ReLU()])
def test_the_activation_of_an_mlp_is_that_of_the_model(between):
    home = importlib.import_module("spandrel.architectures.HAT.__arch.HAT")
    plain = torch.nn.ModuleDict({"mlp": home.Mlp(12, 30, act_layer=lambda: between)}).eval()
    fast = copy.deepcopy(plain)
    assert replace_modules(fast)["HAT Mlp"] == 1
    x = torch.randn(2, 40, 12)
    with torch.inference_mode():
        torch.testing.assert_close(fast["mlp"](x), plain["mlp"](x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_of_one_pixel_leave_tokens_as_they_lie(bias, dtype):
    plain = torch.nn.Conv2d(40, 7, 1, bias=bias).to(dtype)
    fast = OptimizedPointwiseConv(plain)
    tokens = torch.randn(2, 5, 6, 40, dtype=dtype)
    image = tokens.permute(0, 3, 1, 2)
    with torch.inference_mode():
        found = fast(image)
        torch.testing.assert_close(found, plain(image))
        torch.testing.assert_close(fast(image[0]), plain(image[0]))
        assert found.permute(0, 2, 3, 1).is_contiguous()
        # Adjacent pixels stay adjacent.
        assert torch.equal(fast(image.contiguous()), plain(image.contiguous()))
        assert fast(image.contiguous()).is_contiguous()


def test_other_convolutions_are_no_layers_over_tokens():
    made = [
        torch.nn.Conv2d(4, 4, 3),
        torch.nn.Conv2d(4, 4, 1, stride=2),
        torch.nn.Conv2d(4, 4, 1, padding=1),
        torch.nn.Conv2d(4, 4, 1, groups=2),
        torch.nn.Conv2d(4, 4, 1, padding=1, padding_mode="reflect"),
        torch.nn.Linear(4, 4),
    ]
    assert not any(OptimizedPointwiseConv.fits(one) for one in made)
    assert OptimizedPointwiseConv.fits(torch.nn.Conv2d(4, 4, 1, padding="valid"))
