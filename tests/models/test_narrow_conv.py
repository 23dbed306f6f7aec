"""Convolutions that leave few channels."""

import pytest
import torch

from lowtide.memory.live_peak import live_peak_bytes
from lowtide.models.optimized import narrow_conv
from lowtide.models.optimized.narrow_conv import OptimizedNarrowConv, narrow_conv2d


@pytest.fixture
def every_size(monkeypatch):
    """Small images too, and one row at a time."""
    monkeypatch.setattr(narrow_conv, "_LEAST_PIXELS", 1)
    monkeypatch.setattr(narrow_conv, "_PRODUCT_BYTES", 1)


@pytest.mark.grid(5)
@pytest.mark.usefixtures("every_size")
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (1, 3), (7, 1)])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (2, 3), (13, 7)])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("few", "bias", "images"), [(3, True, 1), (1, False, 2)])
def test_sums_in_another_order_are_the_same(kernel, size, order, few, bias, images):
    torch.manual_seed(0)
    half = tuple(side // 2 for side in kernel)
    conv = torch.nn.Conv2d(16, few, kernel, padding=half, bias=bias)
    x = torch.randn(images, 16, *size).contiguous(memory_format=order)
    with torch.inference_mode():
        torch.testing.assert_close(OptimizedNarrowConv(conv)(x), conv(x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("height", [128, 129, 300])
def test_strips_meet_without_a_seam(height, monkeypatch):
    monkeypatch.setattr(narrow_conv, "_PRODUCT_BYTES", 1 << 20)  # 75 rows
    conv, x = torch.nn.Conv2d(64, 3, 3, padding=1), torch.randn(1, 64, height, 129)
    exact = torch.nn.functional.conv2d(x.double(), conv.weight.double(), padding=1)
    exact += conv.bias.double().view(-1, 1, 1)
    with torch.inference_mode():
        ours, theirs = ((made - exact).abs().max() for made in (narrow_conv2d(conv, x), conv(x)))
    assert ours < 5e-6
    assert ours <= 1.5 * theirs


def test_only_some_rows_of_products_are_held():
    conv, x = torch.nn.Conv2d(64, 3, 3, padding=1), torch.randn(1, 64, 1024, 1024)
    with torch.inference_mode():
        taken = live_peak_bytes(lambda: narrow_conv2d(conv, x))
    # The result and the products that are summed to it.
    assert taken < 3 * 4 * 1024**2 + 1.2 * narrow_conv._PRODUCT_BYTES


@pytest.mark.usefixtures("every_size")
def test_others_are_run_as_they_are(monkeypatch):
    monkeypatch.setattr(narrow_conv, "_add_around", None)  # fails if called
    conv = torch.nn.Conv2d(16, 3, 3, padding=1)
    x = torch.randn(1, 16, 8, 8)
    assert torch.equal(narrow_conv2d(conv, x), conv(x))  # a gradient may be asked for
    narrow_conv2d(conv, x.requires_grad_()).sum().backward()
    assert x.grad is not None and conv.weight.grad is not None
    with torch.inference_mode():
        low = conv.to(torch.bfloat16)
        assert torch.equal(narrow_conv2d(low, x.bfloat16()), low(x.bfloat16()))
    for other in (
        torch.nn.Conv2d(16, 3, 3),
        torch.nn.Conv2d(16, 3, 3, padding=1, stride=2),
        torch.nn.Conv2d(16, 3, 3, padding=2, dilation=2),
        torch.nn.Conv2d(16, 3, 1),
        torch.nn.Conv2d(16, 4, 3, padding=1, groups=2),
        torch.nn.Conv2d(16, 8, 3, padding=1),
        torch.nn.Conv2d(16, 3, 3, padding=1, padding_mode="reflect"),
        torch.nn.Conv2d(16, 3, 3, padding="same"),
        torch.nn.Conv2d(4, 3, 3, padding=1),
    ):
        assert not OptimizedNarrowConv.fits(other)
