"""Choosing: every field is computed or refused with a reason, and what was decided is recorded."""

import dataclasses

import pytest
import torch

from lowtide import UsageError
from lowtide.attention import backends, verify
from lowtide.attention.backends.backend import ReferenceBackend
from lowtide.attention.backends.chunked import ChunkedBackend
from lowtide.attention.dispatch import resolve
from lowtide.attention.functional import attention, describe_tensors, explain
from lowtide.attention.spec import AttentionCall, AttentionSpec, LocalDevice

CALL = AttentionCall(
    dtype=torch.float16, head_dim=64, query_tokens=256, key_tokens=256, heads=4, key_heads=4
)
AMPERE, HOPPER = LocalDevice("cuda", (8, 6)), LocalDevice("cuda", (9, 0))


def qkv(*shape):
    return tuple(torch.randn(shape or (1, 2, 20, 8)) for _ in range(3))


def on(device, **changes):
    return resolve(dataclasses.replace(CALL, **changes), device, verify=False)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, "sdpa-flash"),
        ({"has_mask": True}, "sdpa-efficient"),
        ({"head_dim": 512}, "sdpa-efficient"),
        ({"dtype": torch.float32}, "sdpa-efficient"),
        ({"dtype": torch.float64}, "sdpa-math"),
        ({"head_dim": 33, "dtype": torch.float32}, "sdpa-math"),
    ],
)
def test_the_first_that_can_do_all_is_taken(changes, taken):
    assert on(AMPERE, **changes).backend == taken


def test_each_passed_over_backend_has_a_reason():
    found = on(AMPERE, has_mask=True, needs_grad=True)
    said = {verdict.backend: verdict.reason for verdict in found.verdicts}
    assert set(said) == set(backends.BACKENDS)
    assert said["sdpa-flash"] == "there is a mask"
    assert all(said.values())
    assert [v.backend for v in found.verdicts if v.chosen] == ["sdpa-efficient"]
    assert found.explain().startswith("→ sdpa-efficient")


def test_unverified_backends_are_used_only_by_name(monkeypatch):
    for name in ("flash2", "sage", "flex"):
        monkeypatch.setattr(backends.BACKENDS[name], "missing_requirement", lambda device: None)
    found = on(HOPPER)
    said = {verdict.backend: verdict.reason for verdict in found.verdicts}
    assert found.backend.startswith("sdpa-")
    for name in ("flash2", "sage", "flex"):
        assert said[name].startswith("unverified on a GPU")
        assert resolve(CALL, HOPPER, backend=name, verify=False).backend == name


def test_strict_raises_and_prefer_records():
    call = dataclasses.replace(CALL, has_mask=True)
    with pytest.raises(UsageError, match="sdpa-flash does not support this call: there is a mask"):
        resolve(call, AMPERE, backend="sdpa-flash", verify=False)
    found = resolve(call, AMPERE, backend="sdpa-flash", policy="prefer", verify=False)
    assert (found.backend, found.fallback) == ("sdpa-efficient", "sdpa-flash: there is a mask")
    assert on(AMPERE).fallback is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "nope"}, "'nope' is not known"),
        ({"policy": "strict"}, "with no backend"),
        ({"backend": "reference", "policy": "auto"}, "with backend 'reference'"),
        ({"policy": "maybe"}, "'maybe' is not known"),
    ],
)
def test_contradictions_are_named(options, words):
    with pytest.raises(UsageError, match=words) as caught:
        resolve(CALL, **options)
    assert caught.value.hint


def test_gradients_through_an_inference_kernel_are_refused(monkeypatch):
    monkeypatch.setattr(backends.BACKENDS["sage"], "missing_requirement", lambda device: None)
    call = dataclasses.replace(CALL, needs_grad=True)
    with pytest.raises(
        UsageError, match="sage does not support this call: it has no backward pass"
    ):
        resolve(call, AMPERE, backend="sage", verify=False)


@pytest.mark.parametrize("name", ["flash2", "sage"])
def test_a_missing_package_is_named_with_its_command(name):
    with pytest.raises(UsageError, match="not installed; needs") as caught:
        attention(*qkv(), backend=name)
    assert caught.value.hint.endswith(("pip install '.[flash]'", "pip install '.[sage]'"))


class Wrong(ReferenceBackend):
    """Forgets the mask, as wrappers do."""

    name = "wrong"

    def run(self, query, key, value, mask, spec):
        """Attention without the mask."""
        return super().run(query, key, value, None, spec)


class WrongBackward(ChunkedBackend):
    """Right forward, and gradients of the key twice as large."""

    name = "wrong"

    def run(self, query, key, value, mask, spec):
        """Attention whose key counts twice in gradients."""
        return super().run(query, 2 * key - key.detach(), value, mask, spec)


@pytest.fixture
def put_first(monkeypatch):
    def put(backend):
        rest = dict(backends.BACKENDS)
        monkeypatch.setattr("lowtide.attention.dispatch.BACKENDS", {"wrong": backend, **rest})
        monkeypatch.setitem(backends.BACKENDS, "wrong", backend)
        verify._trial_failure.cache_clear()

    yield put
    verify._trial_failure.cache_clear()


def test_a_backend_that_drops_the_mask_is_found_out(put_first):
    put_first(Wrong())
    mask = torch.randn(20, 20)
    assert torch.equal(attention(*qkv(), backend="wrong").isfinite(), torch.ones(1, 2, 20, 8) > 0)
    said = explain(*qkv(), mask)
    assert "not used: in a trial its result is off by" in said
    with pytest.raises(
        UsageError, match="wrong does not support this call: not used: in a trial its result"
    ):
        attention(*qkv(), mask, backend="wrong")


def test_wrong_gradients_are_found_out_where_they_are_wanted(put_first):
    put_first(WrongBackward())
    tensors = qkv()
    attention(*tensors, backend="wrong")
    tensors[1].requires_grad_()
    with pytest.raises(UsageError, match="the key's gradient is off"):
        attention(*tensors, backend="wrong")


def test_a_trial_leaves_no_trace():
    verify._trial_failure.cache_clear()
    tensors = *qkv(), torch.randn(20, 20)
    state = torch.random.get_rng_state()
    attention(*tensors)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        verify._trial_failure.cache_clear()
        attention(*qkv())
        assert torch.is_inference_mode_enabled()


def test_a_learned_bias_and_five_dimensions_stay_on_the_fused_kernel():
    """PyTorch's own call takes plain operators for both, without a word."""
    bias = torch.nn.Parameter(torch.randn(2, 20, 20))
    with torch.no_grad():
        assert resolve(describe_tensors(*qkv(), bias, AttentionSpec())).backend == "sdpa-flash"
    windows = qkv(3, 5, 2, 20, 8)
    assert resolve(describe_tensors(*windows, None, AttentionSpec())).backend == "sdpa-flash"
    with torch.profiler.profile() as profiled, torch.no_grad():
        attention(*windows, bias)
    names = {event.name for event in profiled.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    # Where it is trained, memory stays bounded too, with its gradient.
    assert resolve(describe_tensors(*qkv(), bias, AttentionSpec())).backend == "chunked"


def test_many_heads_are_split_into_launches():
    call = dataclasses.replace(CALL, batch=70_000, heads=2, key_heads=2)
    assert on(AMPERE, batch=70_000, heads=2, key_heads=2).max_heads == 65_535
    assert on(AMPERE).max_heads is None
    # 32 bits index the backward pass of flash: fewer for long sequences.
    long = dataclasses.replace(call, query_tokens=4096, key_tokens=4096, needs_grad=True)
    assert resolve(long, AMPERE, verify=False).max_heads == (2**31 - 1) // (4096 * 64)


@pytest.mark.parametrize("shape", [(7, 3, 20, 8), (1, 11, 20, 8), (2, 5, 20, 8)])
@pytest.mark.parametrize("mask", [(1, 1), (7, 1), (1, 3)])
def test_a_call_in_parts_is_the_call(shape, mask):
    batch, heads = (size if size == 1 else whole for size, whole in zip(mask, shape, strict=False))
    bias = torch.randn(batch, heads, 20, 20)
    tensors = qkv(*shape)
    whole = resolve(describe_tensors(*tensors, bias, AttentionSpec()))
    for most in (1, 3, 4, 7):
        parts = dataclasses.replace(whole, max_heads=most)
        found = attention(*tensors, bias, resolution=parts)
        torch.testing.assert_close(found, attention(*tensors, bias), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "mask", "words"),
    [
        ([(2, 20, 8)] * 3, None, "at least 4 dimensions"),
        ([(1, 2, 20, 8), (1, 2, 20, 16), (1, 2, 20, 16)], None, "differ in head dimension"),
        ([(1, 20, 2, 8), (1, 30, 2, 8), (1, 30, 2, 8)], None, "differ in heads"),
        ([(1, 2, 20, 8), (1, 2, 30, 8), (1, 2, 20, 8)], None, "differ in tokens"),
        ([(1, 2, 20, 8), (2, 2, 20, 8), (2, 2, 20, 8)], None, "differ in batch"),
        ([(1, 4, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8)], None, "differ in heads"),
        ([(1, 2, 20, 8)] * 3, (20, 21), "does not fit scores"),
        ([(1, 2, 20, 8)] * 3, (20,), "does not fit scores"),
        ([(1, 2, 20, 8)] * 3, (3, 2, 20, 20), "does not fit scores"),
    ],
)
def test_tensors_that_do_not_fit_are_named(shapes, mask, words):
    tensors = [torch.randn(shape) for shape in shapes]
    with pytest.raises(UsageError, match=words):
        attention(*tensors, None if mask is None else torch.randn(mask))


def test_types_that_do_not_fit_are_named():
    query, key, value = qkv()
    with pytest.raises(UsageError, match="not float32, float16, float32"):
        attention(query, key.half(), value)
    with pytest.raises(UsageError, match="not int64"):
        attention(query.long(), key.long(), value.long())
    with pytest.raises(UsageError, match="a mask of int64") as caught:
        attention(query, key, value, torch.ones(20, 20, dtype=torch.int64))
    assert "bool" in caught.value.hint
    with pytest.raises(UsageError, match="several devices"):
        attention(query, key, value.to("meta"))
    with pytest.raises(UsageError, match="dropout 1"):
        attention(query, key, value, spec=AttentionSpec(dropout=1))
    with pytest.raises(UsageError, match="3 query heads cannot share 2"):
        spec = AttentionSpec(grouped=True)
        attention(torch.randn(1, 3, 9, 8), *qkv(1, 2, 9, 8)[:2], spec=spec)


@pytest.mark.parametrize("backend", [None, "sdpa-math"])
def test_dropout_drops_the_requested_fraction(backend):
    query, key = torch.zeros(1, 1, 200, 8), torch.zeros(1, 1, 300, 8)
    value = torch.ones(1, 1, 300, 8)
    result = attention(query, key, value, spec=AttentionSpec(dropout=0.5), backend=backend)
    assert result.std() > 0.01
    assert result.mean().item() == pytest.approx(1, abs=0.05)
