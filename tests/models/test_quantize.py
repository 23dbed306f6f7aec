"""Linear layers in 8 bits."""

import sys
from unittest import mock

import pytest
import torch
from torch import nn

import lowtide
from lowtide.attention.spatial import (
    LinearAttention,
    LocalWindowAttention,
    TransposedAttention,
)
from lowtide.core.errors import UsageError
from lowtide.core.metrics import psnr
from lowtide.jobs.upscale_settings import UpscaleSettings
from lowtide.models.loaded_model import weight_bytes
from lowtide.models.optimized.token_linear import OptimizedLinear
from lowtide.models.quantize import quantize_linear


class Layers(nn.Module):
    """Of all kinds: large, too small, odd, in a fast form, and a convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large, self.odd = nn.Linear(32, 48), nn.Linear(48, 36)
        self.fast, self.small = OptimizedLinear(nn.Linear(36, 40)), nn.Linear(40, 4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.eval().requires_grad_(False)

    def forward(self, x):
        x = self.fast(self.odd(self.large(x).relu()).relu())
        return self.conv(self.small(x).mT)


def test_large_layers_are_rounded_and_no_others():
    plain, rounded = Layers(), Layers()
    assert quantize_linear(rounded, "cpu") == 3
    # Of each large layer three quarters are saved, but for a scale of each row.
    saved = sum(3 * out * into - 4 * out for into, out in ((32, 48), (48, 36), (36, 40)))
    assert weight_bytes(plain) - weight_bytes(rounded) == pytest.approx(saved, rel=0.1)
    assert type(rounded.small.weight) is type(rounded.conv.weight) is nn.Parameter
    assert type(rounded.large.weight) is not nn.Parameter
    assert type(rounded.fast) is nn.Linear
    x = torch.randn(2, 50, 32)
    with torch.inference_mode():
        expected, found = plain(x), rounded(x)
    assert not torch.equal(found, expected)
    span = float(expected.max() - expected.min())
    assert psnr(found.numpy(), expected.numpy(), peak=span) > 40


def test_unquantized_convolutions_can_be_channels_last(network, write):
    model = lowtide.load(write(network("swinir"), "swinir.pth"))
    with mock.patch("lowtide.models.quantize._LEAST", 4):
        assert quantize_linear(model.module, "cpu") > 0
    image = torch.rand(1, 3, 16, 24)
    before = model(image)
    model.to(memory_format=torch.channels_last)
    weights = [weight for weight in model.module.parameters() if weight.dim() == 4]
    assert weights
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in weights)
    assert torch.allclose(model(image), before, atol=1e-3)


def test_a_gpu_takes_multiples_of_8_only():
    assert quantize_linear(Layers(), "cuda:0") == 1


@pytest.fixture
def as_on_a_card():
    """torchao requires a GPU before it rounds; PyTorch computes the same on the CPU, slowly."""
    with mock.patch("torchao.quantization.quant_api._check_hardware_support") as check:
        yield
    assert check.called


def in_fp8(tensor):
    """As numbers of e4m3, each row by a scale of its own."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = (tensor.abs().amax(-1, keepdim=True) / most).float()
    return (tensor.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.skipif(torch.__version__ < "2.12", reason="2.11 has no fp8 rows on the CPU")
@pytest.mark.usefixtures("as_on_a_card")
def test_in_fp8_weights_and_inputs_are_rounded_by_rows():
    plain, rounded = Layers().bfloat16(), Layers().bfloat16()
    assert quantize_linear(rounded, "cpu", "fp8") == 1  # the others are no multiples of 16
    x = torch.randn(2, 50, 32).bfloat16()
    with torch.inference_mode():
        layer = plain.large
        found, expected = rounded.large(x), in_fp8(x) @ in_fp8(layer.weight).mT
        expected += layer.bias.float()
        # Results are rounded to bf16, and a number between two of e4m3 may go either way.
        error, gained = (
            float((one - expected).square().mean().sqrt()) for one in (found, layer(x))
        )
        assert error < 0.1 * gained
        whole, low = plain(x).float(), rounded(x).float()
    assert psnr(low.numpy(), whole.numpy(), peak=float(whole.max() - whole.min())) > 25
    # A byte of each weight is saved, but for a scale of each row.
    assert weight_bytes(plain) - weight_bytes(rounded) == 48 * 32 - 4 * 48
    assert type(rounded.odd.weight) is nn.Parameter


def test_layers_that_stayed_in_fp32_are_none_for_fp8():
    with pytest.raises(UsageError, match="no linear layers"):
        quantize_linear(Layers(), "cpu", "fp8")


def test_nothing_to_round_is_an_error():
    with pytest.raises(UsageError, match="no linear layers"):
        quantize_linear(nn.Sequential(nn.Conv2d(3, 64, 3), nn.Linear(64, 8)), "cpu")


def test_without_torchao_it_says_what_to_install():
    with (
        mock.patch.dict(sys.modules, {"torchao": None, "torchao.quantization": None}),
        pytest.raises(UsageError, match="torchao") as caught,
    ):
        quantize_linear(Layers(), "cpu")
    assert "lowtide[int8]" in caught.value.hint


def test_a_torchao_for_another_pytorch_is_told_from_none(tmp_path, monkeypatch):
    """Newer ones import from PyTorch what an older one lacks."""
    (tmp_path / "torchao-9.0.dist-info").mkdir()
    (tmp_path / "torchao-9.0.dist-info" / "METADATA").write_text("Name: torchao\nVersion: 9.0\n")
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").touch()
    (tmp_path / "torchao" / "quantization.py").write_text("from torch.nn import NotYetThere\n")
    monkeypatch.syspath_prepend(tmp_path)
    others = {name: sys.modules[name] for name in sys.modules if name.split(".")[0] != "torchao"}
    with (
        mock.patch.dict(sys.modules, others, clear=True),
        pytest.raises(UsageError, match=r"torchao 9\.0 does not fit PyTorch") as caught,
    ):
        quantize_linear(Layers(), "cpu")
    assert str(caught.value).endswith("cannot import name 'NotYetThere' from 'torch.nn'")
    assert "the torchao of this PyTorch's time" in caught.value.hint


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_bands_of_rows_are_refused(precision):
    with pytest.raises(UsageError, match="8-bit layers"):
        UpscaleSettings.of(precision=precision, strategy="streamed")


@pytest.mark.parametrize("kind", [LinearAttention, LocalWindowAttention, TransposedAttention])
def test_attention_that_takes_parts_of_a_weight(kind):
    """Queries, keys and values are projected apart, by slices of one 8-bit weight."""
    torch.manual_seed(0)
    network, image = kind(32).eval().requires_grad_(False), torch.rand(1, 32, 37, 13)
    exact = network(image)
    assert quantize_linear(network, "cpu") == (1 if kind is TransposedAttention else 2)
    found = network(image)
    with torch.inference_mode():
        assert torch.equal(network(image), found)
    assert not torch.equal(found, exact)
    assert psnr(found.numpy(), exact.numpy(), peak=float(exact.max() - exact.min())) > 35
