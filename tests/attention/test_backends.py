"""Every backend that runs here computes what the reference does, forward and backward."""

import random

import pytest
import torch

from lowtide.attention.backends import BACKENDS, AttentionBackend
from lowtide.attention.backends.chunked import ChunkedBackend
from lowtide.attention.functional import attention
from lowtide.attention.spec import AttentionSpec, LocalDevice, describe_call
from lowtide.memory.live_peak import live_peak_bytes

# What needs no more than PyTorch.
HERE = [
    name for name, backend in BACKENDS.items() if backend.missing_requirement(LocalDevice()) is None
]
FAST = [name for name in HERE if name != "reference"]
MASKS = ("none", "bool", "float", "learned", "heads only", "row", "blind rows")


def test_backends_that_run_on_a_cpu():
    assert {"reference", "chunked", "sdpa-flash", "sdpa-math"} == set(HERE)


def make_mask(kind, batch, heads, queries, keys, dtype):
    if kind == "none":
        return None
    if kind == "bool":
        return torch.rand(batch, 1, queries, keys) > 0.3
    if kind == "heads only":
        return torch.randn(1, heads, queries, keys, dtype=dtype)
    if kind == "row":
        return torch.randn(batch, 1, 1, keys, dtype=dtype)
    if kind == "blind rows":
        mask = torch.rand(batch, heads, queries, keys) > 0.5
        mask[..., ::2, :] = False
        return mask
    mask = torch.randn(batch, heads, queries, keys, dtype=dtype)
    return mask.requires_grad_(kind == "learned")


def drawn(seed, dtype=torch.float64):
    """Sizes 1..70, tensors that want gradients, and one of the masks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads = draw.randint(1, 3), draw.choice([1, 2, 4])
    causal, grouped = draw.random() < 0.3, draw.random() < 0.3
    queries, keys = draw.randint(1, 70), draw.randint(1, 70)
    dim = draw.choice([1, 7, 8, 16, 33])
    value_dim = dim if draw.random() < 0.7 else draw.randint(1, 40)
    key_heads = draw.choice([n for n in (1, 2, 4) if heads % n == 0]) if grouped else heads
    tensors = [
        torch.randn(batch, n, tokens, width, dtype=dtype, requires_grad=True)
        for n, tokens, width in (
            (heads, queries, dim),
            (key_heads, keys, dim),
            (key_heads, keys, value_dim),
        )
    ]
    mask = None if causal else make_mask(draw.choice(MASKS), batch, heads, queries, keys, dtype)
    scale = draw.choice([None, 0.5])
    return tensors, mask, AttentionSpec(scale=scale, causal=causal, grouped=grouped)


def gradients(name, tensors, mask, spec):
    """The result, and the gradients of all that learns."""
    learning = [t for t in (*tensors, mask) if t is not None and t.requires_grad]
    result = attention(*tensors, mask, spec, backend=name)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return result, *torch.autograd.grad(result, learning, weights)


def accepts(name, tensors, mask, spec):
    call = describe_call(tuple(tensors), mask, spec)
    return BACKENDS[name].unsupported_reason(LocalDevice(), call) is None


@pytest.mark.grid(2)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("name", FAST)
def test_parity_forward_and_backward(name, part):
    """400 draws for each backend, in fp64."""
    tried = 0
    for seed in range(part * 40, part * 40 + 40):
        tensors, mask, spec = drawn(seed)
        if not accepts(name, tensors, mask, spec):
            continue
        tried += 1
        wanted = gradients("reference", tensors, mask, spec)
        for one, other in zip(gradients(name, tensors, mask, spec), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert tried >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["chunked", "sdpa-flash"])
def test_low_precision_is_off_by_at_most_twice_plain_pytorch(name, dtype):
    for seed in range(20):
        tensors, mask, spec = drawn(seed, dtype)
        if not accepts(name, tensors, mask, spec):
            continue
        exact = [t.detach().double() for t in tensors]
        bias = mask if mask is None or mask.dtype == torch.bool else mask.detach().double()
        wanted = attention(*exact, bias, spec, backend="reference")
        with torch.no_grad():
            found = attention(*tensors, mask, spec, backend=name)
            plain = attention(*tensors, mask, spec, backend="sdpa-math")
        error = (found.double() - wanted).abs().max()
        usual = (plain.double() - wanted).abs().max()
        floor = torch.finfo(dtype).eps * wanted.abs().max()
        assert error <= 2 * max(usual, floor)


@pytest.mark.parametrize("name", HERE)
def test_queries_that_see_nothing_get_zeros_and_no_gradient(name):
    tensors = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    result, of_query, *_ = gradients(name, tensors, mask, AttentionSpec())
    assert (result[:, :, 2] == 0).all()
    assert (of_query[:, :, 2] == 0).all()
    assert result.isfinite().all()


@pytest.mark.parametrize("name", HERE)
def test_values_that_are_not_finite_stay_to_be_seen(name):
    """PyTorch's fused kernel makes zeros of them where there are fewer than 16 keys."""
    for keys in range(1, 40):
        query, key, value = (torch.randn(1, 1, n, 8) for n in (6, keys, keys))
        query[0, 0, 2] = torch.nan
        result = attention(query, key, value, backend=name, policy="prefer")
        assert result[0, 0, 2].isnan().all()
        assert result[0, 0, [0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("name", HERE)
def test_inputs_are_left_as_they_were(name):
    tensors = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    mask = torch.randn(9, 9)
    before = [t.clone() for t in (*tensors, mask)]
    attention(*tensors, mask, backend=name)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, mask), before, strict=True))


@pytest.mark.parametrize("shape", [(1, 1, 1000, 700), (3, 4, 65, 1500), (300, 2, 16, 16)])
def test_blocks_of_scores_bound_what_chunked_holds(shape):
    batch, heads, queries, keys = shape
    scores = 1 << 14
    backend, spec = ChunkedBackend(scores), AttentionSpec()
    query = torch.randn(batch, heads, queries, 16)
    key, value = (torch.randn(batch, heads, keys, 16) for _ in range(2))
    call = describe_call((query, key, value), None, spec)
    with torch.no_grad():
        peak = live_peak_bytes(lambda: backend.run(query, key, value, None, spec))
        wanted = attention(query, key, value, backend="reference")
        torch.testing.assert_close(backend.run(query, key, value, None, spec), wanted)
    assert peak - query.nbytes <= 1.2 * backend.workspace_bytes(LocalDevice(), call)
    whole = 4 * call.score_count
    assert peak - query.nbytes < max(whole, 4 * 5 * scores + 8 * call.score_count // keys)


def test_reference_memory_is_as_predicted():
    tensors = [torch.randn(1, 2, 300, 16) for _ in range(3)]
    call = describe_call(tuple(tensors), None, AttentionSpec())
    for name in ("reference", "sdpa-math"):
        backend: AttentionBackend = BACKENDS[name]
        with torch.no_grad():
            peak = live_peak_bytes(lambda run=backend.run: run(*tensors, None, AttentionSpec()))
        predicted = backend.workspace_bytes(LocalDevice(), call)
        assert 0.5 * predicted <= peak <= 1.2 * predicted
