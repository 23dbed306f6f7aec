"""Attention by oneDNN's products: for processors whose own kernel has slow ones."""

import pytest
import torch

from lowtide import UsageError
from lowtide.attention.backends import chunked
from lowtide.attention.dispatch import resolve
from lowtide.attention.functional import attention, explain, resolve_cached
from lowtide.attention.spatial import LocalWindowAttention
from lowtide.attention.spec import AttentionSpec, LocalDevice, describe_call
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.prediction.operator_costs import multiply_adds
from lowtide.memory.tracing.steps import InferenceStep

BACKEND, HERE = chunked.OneDnnBackend(), LocalDevice()
pytestmark = pytest.mark.skipif(
    BACKEND.missing_requirement(HERE) is not None, reason="PyTorch is built without oneDNN for x86"
)


def tensors(batch, heads, queries, keys, width, value_width=None):
    torch.manual_seed(0)
    shapes = (queries, width), (keys, width), (keys, value_width or width)
    return tuple(torch.randn(batch, heads, *shape) for shape in shapes)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1),
        (2, 3, 7, 5, 3),
        (3, 2, 65, 83, 33, 17),
        (1, 2, 577, 1023, 32),
        (1, 1, 300, 5000, 40),
    ],
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_parity_with_exact_attention(sizes, scale):
    query, key, value = tensors(*sizes)
    spec = AttentionSpec(scale=scale)
    wanted = attention(query.double(), key.double(), value.double(), None, spec)
    found = attention(query, key, value, None, spec, backend="onednn")
    plain = attention(query, key, value, None, spec, backend="sdpa-math")
    assert_as_near(found, plain, wanted)


def assert_as_near(found, plain, wanted):
    usual = (plain.double() - wanted).square().mean().sqrt()
    floor = torch.finfo(torch.float32).eps * wanted.abs().max()
    assert (found.double() - wanted).square().mean().sqrt() <= 3 * max(usual, floor)


@pytest.mark.grid(5)
@pytest.mark.parametrize(
    "shape", [(1, 3, 65, 83), (2, 3, 65, 83), (2, 1, 65, 83), (1, 1, 1, 83), (3, 65, 1), (65, 83)]
)
@pytest.mark.parametrize("at_once", [7 * 83, 1 << 20])  # scores: ten parts, and one
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_numbers_are_added_to_scores(monkeypatch, shape, at_once, size):
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", at_once)
    query, key, value = tensors(2, 3, 65, 83, 33, 17)
    mask = torch.randn(shape) * size
    before = mask.clone()
    exact = [one.double() for one in (query, key, value, mask)]
    wanted = attention(*exact, backend="reference")
    found = attention(query, key, value, mask, backend="onednn")
    assert_as_near(found, attention(query, key, value, mask, backend="sdpa-math"), wanted)
    assert torch.equal(mask, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_added_numbers_may_be_of_another_type(dtype):
    query, key, value = tensors(1, 2, 40, 50, 8)
    mask = torch.randn(2, 40, 50).to(dtype)
    found = attention(query, key, value, mask, backend="onednn")
    assert torch.equal(found, attention(query, key, value, mask.float(), backend="onednn"))


def test_keys_that_nobody_sees():
    query, key, value = tensors(2, 3, 65, 83, 8)
    mask = torch.zeros(1, 3, 65, 83)
    mask[:, :, :, 60:] = -torch.inf
    mask[:, 1, 9] = -torch.inf
    found = attention(query, key, value, mask, backend="onednn")
    torch.testing.assert_close(found, attention(query, key, value, mask, backend="reference"))
    assert (found[:, 1, 9] == 0).all() and (found[:, 0, 9] != 0).all()
    query[0, 1, 9] = torch.nan  # which is to be seen, though it sees no key
    assert attention(query, key, value, mask, backend="onednn")[0, 1, 9].isnan().all()


def test_views_of_one_tensor_are_taken_as_they_are():
    together = torch.randn(2, 90, 3, 4, 16)  # (batch, tokens, three, heads, width)
    query, key, value = together.permute(2, 0, 3, 1, 4)
    before = together.clone()
    found = attention(query, key, value, backend="onednn")
    torch.testing.assert_close(found, attention(query, key, value, backend="reference"))
    assert torch.equal(together, before)
    assert found.transpose(1, 2).is_contiguous()  # so that heads are joined without a copy


def test_numbers_that_are_not_finite_stay_to_be_seen():
    query, key, value = tensors(1, 1, 6, 40, 8)
    query[0, 0, 2] = torch.nan
    result = attention(query, key, value, backend="onednn")
    assert result[0, 0, 2].isnan().all()
    assert result[0, 0, [0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.grid(3)
@pytest.mark.parametrize("sizes", [(1, 2, 576, 1024, 32), (2, 1, 300, 9000, 16), (5, 4, 64, 70, 8)])
@pytest.mark.parametrize("size", [1, 1000])  # of scores: large ones are computed again
@pytest.mark.parametrize("masked", [False, True])
def test_its_workspace(sizes, size, masked):
    query, key, value = tensors(*sizes)
    query *= size
    mask = torch.randn(1, *sizes[1:4]) if masked else None
    call = describe_call((query, key, value), mask, AttentionSpec())
    with torch.no_grad():
        peak = live_peak_bytes(lambda: BACKEND.run(query, key, value, mask, AttentionSpec()))
    held = peak - query.nbytes  # the result has the query's shape
    predicted = BACKEND.workspace_bytes(HERE, call)
    assert 0.5 * predicted <= held <= 1.05 * predicted + 4096


@pytest.mark.parametrize("sizes", [(3, 4, 577, 1000, 32, 16), (1, 1, 7, 9, 8), (0, 2, 7, 9, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_trace_has_the_work_of_all_heads(sizes, masked):
    batch, heads, queries, keys, width, *_ = sizes
    query, key, value = tensors(*sizes)
    mask = torch.zeros(1, heads, queries, keys, device="meta") if masked else None

    class Whole(torch.nn.Module):
        def forward(self, image):
            return BACKEND.run(image, key.to("meta"), value.to("meta"), mask, AttentionSpec())

    trace = trace_step(Whole(), InferenceStep((query.to("meta"),)))
    products = batch * heads * queries * keys * (width + value.shape[-1])
    assert multiply_adds(trace) == products


def test_it_is_chosen_for_windows_but_not_for_a_few_tokens(on_amd):
    query, key, value = tensors(1, 2, 576, 1024, 32)
    assert explain(query, key, value).startswith("→ onednn ")
    few = explain(query[:, :, :48], key, value)
    assert few.startswith("→ sdpa-flash ")
    assert "for so few tokens PyTorch's own kernel is as fast" in few
    bias = torch.zeros(1, 2, 576, 1024)
    assert explain(query, key, value, bias).startswith("→ onednn ")
    assert explain(query, key, value, bias > 0).startswith("→ sdpa-flash ")
    assert explain(query.double(), key.double(), value.double()).startswith("→ sdpa-flash ")


def test_many_threads_would_wait_for_each_other(on_amd):
    query, key, value = tensors(1, 2, 576, 1024, 32)
    call = describe_call((query, key, value), None, AttentionSpec())
    assert resolve_cached(call, LocalDevice(), None, None).backend == "onednn"
    torch.set_num_threads(16)
    assert resolve_cached(call, LocalDevice(), None, None).backend == "sdpa-flash"
    assert explain(*tensors(1, 1, 4096, 4096, 8)).startswith("→ onednn ")


def test_other_processors_keep_pytorchs_own(monkeypatch):
    monkeypatch.setattr(chunked, "is_amd", lambda: False)
    call = describe_call(tensors(1, 2, 576, 1024, 32), None, AttentionSpec())
    said = {one.backend: one.reason for one in resolve(call).verdicts}
    assert said["onednn"] == "PyTorch's own kernel is as fast on this CPU"
    assert resolve(call, backend="onednn").backend == "onednn"  # where it is asked for


def test_unsupported_calls_are_refused_by_reason():
    query, key, value = tensors(1, 2, 40, 40, 8)
    seen = torch.ones(40, 40, dtype=torch.bool)
    learned = torch.zeros(40, 40, requires_grad=True)
    for spec, mask, reason in (
        (AttentionSpec(causal=True), None, "attention is causal"),
        (AttentionSpec(dropout=0.1), None, "there is dropout"),
        (AttentionSpec(), seen, "the mask is boolean"),
        (AttentionSpec(), learned, "gradients are recorded"),
    ):
        with pytest.raises(UsageError, match=reason):
            attention(query, key, value, mask, spec, backend="onednn")
    with pytest.raises(UsageError, match="gradients are recorded"):
        attention(query.requires_grad_(), key, value, backend="onednn")


@pytest.mark.parametrize("form", ["halo", "blended"])
@pytest.mark.parametrize("position", ["rope", "table", "decomposed"])
def test_windows_of_an_image(on_amd, form, position):
    more = {"form": form, "position": position}
    module = LocalWindowAttention(64, **more).eval()
    plain = LocalWindowAttention(64, **more, backend="sdpa-flash").eval()
    plain.load_state_dict(module.state_dict())
    image = torch.randn(1, 64, 61, 75)
    with torch.no_grad():
        torch.testing.assert_close(module(image), plain(image), rtol=1e-5, atol=1e-6)
        assert torch.equal(module.forward_rows(image, 0, 61, 61), module(image))
