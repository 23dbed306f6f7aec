"""Products of many tokens with a matrix, by the faster of the ways that PyTorch has."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from lowtide.attention import cpu_ops


@pytest.mark.grid(11)
# Of 24 and 240 channels both are oneDNN's, of 340 one is made in parts.
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 1001), (1, 4096), (5005,), (3,), (), (0, 4)])
@pytest.mark.parametrize("channels", [24, 240, 340])
@pytest.mark.parametrize("made", [7, 300])
@pytest.mark.parametrize("product", [cpu_ops.cpu_linear, cpu_ops.onednn_linear_any_layout])
def test_it_gives_what_pytorch_gives(monkeypatch, product, shape, channels, made, bias):
    monkeypatch.setattr(cpu_ops, "_BLOCK_BYTES", 64 * 4 * made)
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, channels), torch.randn(made, channels)
    added = torch.randn(made) if bias else None
    found, expected = product(x, weight, added), F.linear(x, weight, added)
    assert found.is_contiguous()
    assert found.shape == expected.shape
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    errors = [(each - exact).square().mean().sqrt() for each in (found, expected)]
    assert not x.numel() or errors[0] <= 3 * errors[1] + 1e-7


class OwnWeight(TwoTensor):
    """A weight that knows PyTorch's own operators alone, as sharded and quantized ones do."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func.namespace == "aten"
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("channels", [24, 340])
def test_weights_of_other_kinds_are_left_to_pytorch(channels):
    weight = torch.randn(70, channels)
    x, own = torch.randn(30_000, channels), OwnWeight(weight, weight)
    found = cpu_ops.cpu_linear(x, own)
    assert torch.equal(found.a, F.linear(x, weight))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gelu_comes_with_the_product(monkeypatch, bias, known):
    monkeypatch.setattr(cpu_ops, "has_onednn", known and cpu_ops.has_onednn)
    torch.manual_seed(0)
    x, weight = torch.randn(5, 1001, 24), torch.randn(70, 24)
    added = torch.randn(70) if bias else None
    found = cpu_ops.onednn_linear_any_layout(x, weight, added, gelu=True)
    torch.testing.assert_close(found, F.gelu(F.linear(x, weight, added)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [24, 48, 180, 192, 193, 244, 308, 320])
def test_sums_round_little_more_than_those_of_pytorch(channels):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4099, channels), torch.randn(90, channels), torch.randn(90)
    found = F.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    ours = cpu_ops.cpu_linear(x, weight, bias)
    assert (ours - exact).square().mean() <= 1.5**2 * (found - exact).square().mean()


@pytest.mark.parametrize("channels", [24, 240, 340])
def test_tokens_may_lie_in_another_order(channels):
    x, weight = torch.randn(channels, 70, 60).permute(2, 1, 0), torch.randn(300, channels)
    torch.testing.assert_close(
        cpu_ops.cpu_linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=2e-5
    )


def test_tokens_are_computed_in_blocks(monkeypatch):
    seen, plain = [], torch.addmm

    def noted(bias, given, *rest, **more):
        seen.append(len(given))
        return plain(bias, given, *rest, **more)

    monkeypatch.setattr(torch, "addmm", noted)
    cpu_ops.cpu_linear(torch.randn(10_000, 340), torch.randn(512, 340), torch.randn(512))
    assert max(seen) * 512 * 4 <= 1 << 20
    assert sum(seen) == 10_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_pytorch(dtype):
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((9000, 24), (300, 24), (300,)))
    assert torch.equal(cpu_ops.cpu_linear(x, weight, bias), F.linear(x, weight, bias))


def test_it_has_gradients():
    x, weight = torch.randn(9000, 24, requires_grad=True), torch.randn(300, 24)
    cpu_ops.cpu_linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))
