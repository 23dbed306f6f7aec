"""Attention over all pixels or channels against formulas that hold everything at once."""

import random

import pytest
import torch
import torch.nn.functional as F

from lowtide import UsageError
from lowtide.attention.spatial import (
    ChannelAttention,
    HierarchicalAttention,
    LinearAttention,
    LocalWindowAttention,
    TransposedAttention,
    image_layout,
)


def linear_reference(module, x):
    """Weights of every pixel for every pixel."""
    batch, channels, height, width = x.shape
    tokens = module.qkv(x.flatten(2).transpose(1, 2)).unflatten(-1, (3, module.heads, -1))
    query, key, value = tokens.permute(2, 0, 3, 1, 4)
    query, key = (torch.where(t > 0, t + 1, t.exp()) for t in (query, key))
    weights = query @ key.transpose(-1, -2)
    weights = weights / weights.sum(-1, keepdim=True)
    found = module.out((weights @ value).transpose(1, 2).flatten(2))
    return found.transpose(1, 2).reshape(batch, channels, height, width)


def channel_reference(module, x):
    mean = torch.stack([plane.mean() for plane in x.flatten(0, 1)]).view(x.shape[:2])
    gate = 1 / (1 + (-module.expand(module.reduce(mean).clamp_min(0))).exp())
    return x * gate[..., None, None]


def transposed_reference(module, x):
    found = module.depthwise(module.qkv(x)).flatten(2)
    query, key, value = (t.unflatten(1, (module.heads, -1)) for t in found.chunk(3, 1))
    query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    weights = (query @ key.transpose(-1, -2) * module.temperature).softmax(-1)
    found = (weights @ value).flatten(1, 2).transpose(1, 2)
    return module.out(found).transpose(1, 2).reshape(x.shape)


def full_reference(module, x):
    """Softmax over all pixels, positions turned one pixel at a time."""
    query, key, value = (t.flatten(1, 2).transpose(1, 2) for t in turned(module, x))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    found = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    return module.out(found).transpose(1, 2).reshape(x.shape)


def turned(module, x):
    from support.spatial_reference import rotated

    query, key, value = module._project(x)
    places = [torch.arange(size) for size in x.shape[2:]]
    return *(rotated(module.position, t, *places) for t in (query, key)), value


MODULES = {
    "linear": (lambda: LinearAttention(8, heads=2), linear_reference),
    "linear, no bias": (lambda: LinearAttention(8, heads=1, bias=False), linear_reference),
    "channel": (lambda: ChannelAttention(8, reduction=3), channel_reference),
    "transposed": (lambda: TransposedAttention(8, heads=2), transposed_reference),
    "transposed, bias": (lambda: TransposedAttention(8, heads=4, bias=True), transposed_reference),
    "hierarchical, full": (
        lambda: HierarchicalAttention(8, heads=1, position="none"),
        full_reference,
    ),
    "hierarchical, chunked": (
        lambda: HierarchicalAttention(8, heads=2, full_tokens=0, chunk=32, backend="sdpa-math"),
        full_reference,
    ),
}


def gradients(run, module, x):
    x = x.detach().requires_grad_()
    result = run(x)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return result, *torch.autograd.grad(result, [x, *module.parameters()], weights)


@pytest.fixture(params=MODULES)
def pair(request):
    """A module whose weights are not at their beginning, and its reference."""
    torch.manual_seed(1)
    module = MODULES[request.param][0]()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module, MODULES[request.param][1]


@pytest.fixture
def narrow_bands(monkeypatch):
    """Bands of a few rows, so that small images have several."""
    monkeypatch.setattr(image_layout.row_spans, "__defaults__", (100,))


def check_parity(pair, seed, dtype, tolerance):
    module, reference = pair
    draw = random.Random(seed)
    x = torch.randn(draw.randint(1, 2), 8, draw.randint(1, 40), draw.randint(1, 40))
    x = x.double() + 0.5
    exact = gradients(lambda y: reference(module, y), module.double(), x)
    found = gradients(module.to(dtype), module, x.to(dtype))
    for one, other in zip(found, exact, strict=True):
        largest = max(1, float(other.detach().abs().max()))
        assert (one - other).detach().abs().max() <= tolerance * largest


@pytest.mark.grid(5)
@pytest.mark.parametrize("seed", range(6))
def test_equals_its_formula(pair, seed, narrow_bands):
    check_parity(pair, seed, torch.float64, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 306))
def test_equals_its_formula_at_drawn_sizes(pair, seed, narrow_bands):
    check_parity(pair, seed, (torch.float64, torch.float32)[seed % 2], (1e-10, 1e-4)[seed % 2])


@pytest.mark.grid(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_plain_operators(pair, dtype):
    module, reference = pair
    x = torch.randn(1, 8, 31, 45)
    with torch.no_grad():
        exact = reference(module.double(), x.double())
        module.to(dtype)
        plain = (reference(module, x.to(dtype)) - exact).abs().max()
        assert (module(x.to(dtype)) - exact).abs().max() <= 2 * plain


@pytest.mark.parametrize("height", [1, 2, 7, 30])
def test_bands_equal_the_whole(height):
    """Sums over bands of any height, then bands of any height."""
    torch.manual_seed(2)
    x = torch.randn(2, 8, 30, 13, dtype=torch.float64)
    bands = [(first, min(first + height, 30)) for first in range(0, 30, height)]
    with torch.no_grad():
        linear = LinearAttention(8, heads=2).double()
        sums = sum(linear.sums_of(x[:, :, a:b]) for a, b in bands)
        parts = [linear.forward_rows(x[:, :, a:b], sums) for a, b in bands]
        assert (torch.cat(parts, 2) - linear(x)).abs().max() < 1e-13
        channel = ChannelAttention(8).double()
        sums = sum(channel.sums_of(x[:, :, a:b]) for a, b in bands)
        parts = [channel.forward_rows(x[:, :, a:b], sums, 30 * 13) for a, b in bands]
        assert (torch.cat(parts, 2) - channel(x)).abs().max() < 1e-13
        crossed = TransposedAttention(8, heads=2).double()
        cut = [(slice(*crossed.rows_needed(*band, 30)), *band, 30) for band in bands]
        sums = sum(crossed.sums_of(x[:, :, rows], *rest) for rows, *rest in cut)
        parts = [crossed.forward_rows(x[:, :, rows], sums, *rest) for rows, *rest in cut]
        assert (torch.cat(parts, 2) - crossed(x)).abs().max() < 1e-13


def test_many_pixels_do_not_overflow_half_precision():
    module = LinearAttention(8, heads=1).half()
    x = torch.full((1, 8, 300, 300), 3.0, dtype=torch.float16)
    with torch.no_grad():
        found = module(x)
    # All pixels are equal, and so is any mean of them.
    assert found.isfinite().all()
    assert (found - found[:, :, :1, :1]).abs().max() == 0


def test_an_image_of_zeros_has_gradients():
    module = TransposedAttention(8)
    x = torch.zeros(1, 8, 5, 5, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.isfinite().all()


def test_stages_follow_the_size():
    module = HierarchicalAttention(8, heads=1)
    assert [module.stage(*size) for size in ((32, 64), (33, 64), (128, 128), (129, 128))] == [
        "full",
        "chunked",
        "chunked",
        "windows",
    ]


def test_large_images_get_windows():
    torch.manual_seed(0)
    limits = dict(full_tokens=10, chunked_tokens=100)
    whole = HierarchicalAttention(8, heads=1, window=8, shared=4, **limits)
    windows = LocalWindowAttention(8, heads=1, window=8, shared=4)
    windows.load_state_dict(whole.state_dict())
    x = torch.randn(1, 8, 21, 17)
    assert torch.equal(whole(x), windows(x))


def test_rows_of_a_small_image_need_all_of_it():
    module = HierarchicalAttention(8, heads=1, window=8, shared=4)
    assert module.rows_needed(4, 8, 30, 30) == (0, 30)
    assert module.rows_needed(4, 8, 300, 300) == (2, 10)
    x = torch.randn(1, 8, 20, 20)
    with torch.no_grad():
        part = module.forward_rows(x, 4, 8, 20)
        assert (part - module(x)[:, :, 4:8]).abs().max() < 1e-6
    with pytest.raises(UsageError, match="all 20 rows"):
        module.forward_rows(x[:, :, :8], 4, 8, 20)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: HierarchicalAttention(8, position="table"), "not supported by global attention"),
        (lambda: HierarchicalAttention(8, full_tokens=9, chunked_tokens=8), "do not fit together"),
        (lambda: ChannelAttention(8, reduction=0), "reduction must be at least 1, not 0"),
        (lambda: LinearAttention(8, heads=3), "3 heads"),
        (lambda: TransposedAttention(8, heads=5), "5 heads"),
        (lambda: LinearAttention(8)(torch.zeros(1, 4, 4, 4)), "needs 8 channels"),
        (lambda: ChannelAttention(8)(torch.zeros(4, 4)), "needs 8 channels"),
        (lambda: TransposedAttention(8)(torch.zeros(1, 8, 4, 0)), "no pixels"),
    ],
)
def test_bad_input_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
