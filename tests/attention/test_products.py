"""Products of many tokens with a matrix, some at a time."""

import pytest
import torch
import torch.nn.functional as F

from lowtide.attention import products


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 1001), (1, 4096), (5005,), (3,)])
@pytest.mark.parametrize("made", [7, 300])
def test_it_gives_what_pytorch_gives(monkeypatch, shape, made, bias):
    monkeypatch.setattr(products, "_AT_ONCE", 64 * 4 * made)
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, 24), torch.randn(made, 24)
    added = torch.randn(made) if bias else None
    found = products.linear(x, weight, added)
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, weight, added), rtol=1e-6, atol=2e-6)


def test_tokens_may_lie_in_another_order():
    x, weight = torch.randn(24, 70, 60).permute(2, 1, 0), torch.randn(300, 24)
    torch.testing.assert_close(products.linear(x, weight), F.linear(x, weight))


def test_it_makes_some_tokens_at_a_time(monkeypatch):
    seen, plain = [], torch.addmm

    def noted(bias, given, *rest, **more):
        seen.append(len(given))
        return plain(bias, given, *rest, **more)

    monkeypatch.setattr(torch, "addmm", noted)
    products.linear(torch.randn(10_000, 24), torch.randn(512, 24), torch.randn(512))
    assert max(seen) * 512 * 4 <= 1 << 20
    assert sum(seen) == 10_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_pytorch(dtype):
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((9000, 24), (300, 24), (300,)))
    assert torch.equal(products.linear(x, weight, bias), F.linear(x, weight, bias))


def test_it_has_gradients():
    x, weight = torch.randn(9000, 24, requires_grad=True), torch.randn(300, 24)
    products.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))
