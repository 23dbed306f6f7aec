"""Memory of attention on a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lowtide.attention.sdpa_rules import promotes_three_dimensions
from lowtide.attention.spec import AttentionCall
from lowtide.core.units import MIB
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.profiles.attention_kernels import (
    efficient_backward_bytes,
    efficient_forward_bytes,
    flash_backward_bytes,
    flash_forward_bytes,
)
from lowtide.memory.profiles.simulated_device import simulate_attention
from support.gpu_attention import ADA, AMPERE, BF16, FP16, FP32, HOPPER, HOST, Live, bytes_of, qkv

SHAPE = (1, 8, 4096, 64)
OUT, LSE, SCORES = 8 * 4096 * 64 * 2, 8 * 4096 * 4, 8 * 4096 * 4096


def near(expected):
    return pytest.approx(expected, abs=4096)  # seeds, offsets and the like


@pytest.mark.parametrize("profile", [AMPERE, HOPPER, HOST], ids=lambda p: p.name)
def test_fused_kernels_hold_their_result_and_a_sum_per_row(profile):
    _, forward, kept, _ = bytes_of(profile, SHAPE, BF16, grad=True)
    assert forward == near(OUT + LSE) and kept == near(OUT + LSE)


def test_efficient_attention_needs_the_sums_only_for_gradients():
    name, forward, kept, _ = bytes_of(AMPERE, SHAPE, FP32)
    assert name == "efficient" and forward == near(2 * OUT) == kept
    assert bytes_of(AMPERE, SHAPE, FP32, grad=True)[2] == near(2 * OUT + LSE)


def test_math_holds_the_scores():
    """Scores and their softmax in fp32 with a flag each; then the copy in bf16 that is dropped."""
    with sdpa_kernel(SDPBackend.MATH):
        name, forward, kept, _ = bytes_of(AMPERE, SHAPE, BF16)
        assert name == "math" and kept == near(OUT)
        # Query, scaled query, key, value in fp32 are there as well, and the scaled key.
        assert 9 * SCORES + 8 * OUT <= forward <= 9 * SCORES + 10 * OUT
        assert bytes_of(AMPERE, SHAPE, BF16, grad=True)[2] >= 4 * SCORES
    assert forward > 250 * bytes_of(AMPERE, SHAPE, BF16)[1]


def test_math_multiplies_gradient_and_softmax_on_a_gpu():
    """A bound of what one call holds; each of several, one from the other, has its own."""
    with (
        sdpa_kernel(SDPBackend.MATH),
        FakeTensorMode(),
        Live() as live,
        simulate_attention(HOPPER),
    ):
        query, key, value = qkv(SHAPE, FP32, grad=True)
        for _ in range(3):
            value = F.scaled_dot_product_attention(query, key, value)
        live.peak, made = live.now, len(live.ops)
        value.sum().backward()
    held = [op for op in live.ops[made:] if op == "new_empty.default"]
    assert len(held) == 3


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("masked", [False, True])
def test_math_is_predicted_as_the_profiler_measures_it(dtype, masked):
    """The math path is the same host code on every device, so that the CPU can measure it."""
    shape, rows = (1, 2, 1024, 64), (1024, 1024)
    tensors = [torch.rand(shape).to(dtype) for _ in range(3)]
    mask = torch.zeros(rows, dtype=dtype) if masked else None
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        measured = live_peak_bytes(lambda: F.scaled_dot_product_attention(*tensors, mask))
        predicted = bytes_of(AMPERE, shape, dtype, mask=rows if masked else None)[1]
    assert predicted == near(measured)


def test_math_and_flash_differ_by_orders_of_magnitude_in_the_backward_pass_too():
    flash = bytes_of(AMPERE, SHAPE, BF16, grad=True)[3]
    with sdpa_kernel(SDPBackend.MATH):
        math = bytes_of(AMPERE, SHAPE, BF16, grad=True)[3]
    assert math > 8 * SCORES and math > 40 * flash


def test_flash_backward_holds_gradients_and_an_fp32_twin_of_one():
    kept = OUT + LSE
    bare = kept + OUT + 3 * OUT  # the incoming gradient and three outgoing ones
    # The result and its gradient are copied here: they are contiguous by heads, not by tokens.
    full = bytes_of(AMPERE, SHAPE, BF16, grad=True)[3]
    assert full == near(bare + 2 * OUT + LSE + 2 * OUT)


def test_wide_heads_accumulate_in_fp32():
    wide = (1, 1, 4096, 512)
    size = 4096 * 512
    name, forward, _, backward = bytes_of(ADA, wide, BF16, grad=True)
    assert name == "efficient"
    assert forward == near(2 * size + 4 * size + 4096 * 4)
    assert backward > 2 * size * 5 + 3 * 4 * size  # all three gradients have fp32 twins


def test_head_dimensions_that_flash_pads_are_copied():
    shape = (2, 4, 8192, 20)
    padded = 2 * 4 * 8192 * 24 * 2
    name, forward, kept, _ = bytes_of(AMPERE, shape, FP16)
    assert name == "flash"
    assert forward == near(4 * padded + 2 * LSE) and kept == near(padded)


def test_masks_are_expanded_without_copies_unless_misaligned():
    exact, rows = bytes_of(AMPERE, SHAPE, BF16, mask=(4096, 4096)), 4096 * 4096 * 2
    assert exact[0] == "efficient" and exact[1] == near(OUT)
    ragged = bytes_of(AMPERE, (1, 8, 4095, 64), BF16, mask=(4095, 4095))
    assert ragged[1] == pytest.approx(OUT + rows, rel=0.01)


def test_a_mask_of_truth_values_becomes_numbers():
    with FakeTensorMode(), Live() as live, simulate_attention(AMPERE):
        query, key, value = qkv(SHAPE, BF16)
        mask = torch.empty(4096, 4096, dtype=torch.bool)
        base = live.now
        F.scaled_dot_product_attention(query, key, value, mask)
    assert live.peak - base == pytest.approx(4096 * 4096 * 2 + OUT, rel=0.01)


def test_a_learned_bias_keeps_the_fused_kernel_on_gpus_and_loses_it_on_the_cpu():
    paths = {}
    for profile in (AMPERE, HOST):
        with FakeTensorMode(), Live() as live, simulate_attention(profile):
            bias = torch.zeros(8, 256, 256, dtype=FP32, requires_grad=True)
            F.scaled_dot_product_attention(*qkv(grad=True), bias[None]).sum().backward()
            assert bias.grad.shape == bias.shape
        paths[profile.name] = " ".join(live.ops)
    assert "efficient_attention_backward" in paths["rtx3060-12gb"]
    assert "safe_softmax" in paths["cpu"] and "flash" not in paths["cpu"]


def test_three_dimensions_are_what_this_release_makes_of_them():
    with FakeTensorMode(), simulate_attention(AMPERE) as log:
        query, key, value = qkv((8, 256, 64), BF16, grad=True)
        for mask in (None, torch.empty(256, 256, dtype=BF16), torch.empty(8, 256, 256, dtype=BF16)):
            out = F.scaled_dot_product_attention(query, key, value, mask)
            assert out.shape == query.shape
            out.sum().backward()
    with Live() as live:
        F.scaled_dot_product_attention(*qkv((2, 8, 16)))
    fused = any("flash_attention_for_cpu" in op for op in live.ops)
    assert dict(log) == ({"flash": 1, "efficient": 2} if fused else {"math": 3})


def test_the_question_about_three_dimensions_is_not_answered_by_a_fake_tensor():
    outside = promotes_three_dimensions()
    promotes_three_dimensions.cache_clear()
    with FakeTensorMode(), Live() as live, simulate_attention(AMPERE):
        assert promotes_three_dimensions() == outside
    assert live.ops == []


def test_grouped_heads_take_flash():
    with FakeTensorMode(), simulate_attention(AMPERE) as log:
        query = torch.empty(1, 8, 256, 64, dtype=BF16, requires_grad=True)
        key = torch.empty(1, 2, 256, 64, dtype=BF16, requires_grad=True)
        out = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        out.sum().backward()
        assert out.shape == query.shape and key.grad.shape == key.shape
    assert dict(log) == {"flash": 1}


def test_autocast_decides_before_the_kernel_is_chosen():
    with FakeTensorMode(), simulate_attention(AMPERE) as log:
        with torch.autocast("cpu", dtype=BF16):
            assert F.scaled_dot_product_attention(*qkv()).dtype == BF16
        assert F.scaled_dot_product_attention(*qkv()).dtype == FP32
    assert dict(log) == {"flash": 1, "efficient": 1}


@pytest.mark.parametrize(
    "attend",
    [
        F.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    ],
    ids=lambda f: f.__name__,
)
def test_however_it_is_called(attend):
    with FakeTensorMode(), Live() as live, simulate_attention(AMPERE) as log:
        attend(*qkv(dtype=BF16))
    assert dict(log) == {"flash": 1}
    assert any("_scaled_dot_product_flash_attention.default" in op for op in live.ops)


@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention_is_covered(training):
    with FakeTensorMode(), simulate_attention(AMPERE) as log:
        layer = nn.MultiheadAttention(64, 4, batch_first=True, dtype=BF16).train(training)
        tokens = torch.empty(2, 256, 64, dtype=BF16)
        with torch.set_grad_enabled(training):
            out, _ = layer(tokens, tokens, tokens, need_weights=False)
        assert out.shape == tokens.shape
        if training:
            out.sum().backward()
            assert layer.in_proj_weight.grad.shape == layer.in_proj_weight.shape
    assert dict(log) == {"flash": 1}


@pytest.mark.parametrize(
    ("differentiate", "reentrant"),
    [
        (lambda loss, _: loss.backward(), False),
        (lambda loss, _: loss.backward(), True),
        (lambda loss, _: torch.autograd.backward(loss), False),
        (lambda loss, tensors: torch.autograd.grad(loss, tensors), False),
    ],
    ids=["Tensor.backward", "reentrant", "autograd.backward", "autograd.grad"],
)
def test_checkpointing_runs_attention_again_in_the_backward_pass(differentiate, reentrant):
    with FakeTensorMode(), simulate_attention(AMPERE) as log:
        tensors = qkv(dtype=BF16, grad=True)
        attend = lambda *qkv: F.scaled_dot_product_attention(*qkv)  # noqa: E731
        out = checkpoint(attend, *tensors, use_reentrant=reentrant)
        differentiate(out.sum(), tensors)
    assert dict(log) == {"flash": 2}


def test_outside_everything_is_as_before_and_real_tensors_are_refused():
    query, key, value = (torch.rand(1, 2, 8, 16) for _ in range(3))
    before = F.scaled_dot_product_attention(query, key, value)
    with simulate_attention(AMPERE), pytest.raises(TypeError, match="fake tensors"):
        F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(F.scaled_dot_product_attention(query, key, value), before)
    with simulate_attention(HOST):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), before)


def test_scratch_by_hand():
    shape = AttentionCall(torch.bfloat16, 64, 4096, 4096, heads=8)
    assert flash_forward_bytes(shape, 28) == 0  # 512 blocks of rows fill 56 slots
    assert flash_backward_bytes(shape) == 8 * 4096 * (64 + 1) * 4
    assert efficient_forward_bytes(shape) == 0
    assert efficient_backward_bytes(shape) == 8 * 4096 * 4 + 8 * 4096 * 64 * 4
    # One head: 64 blocks of rows on 264 slots, which 4 splits of the keys fill to 97 %.
    single = replace(shape, heads=1)
    assert flash_forward_bytes(single, 132) == 4 * 4096 * 65 * 4
    assert flash_forward_bytes(replace(single, dropout=0.1), 132) == 0
    grouped = replace(shape, key_heads=2)
    assert flash_backward_bytes(grouped) - flash_backward_bytes(shape) == 2 * 8 * 4096 * 64 * 2
    fp32 = replace(shape, dtype=torch.float32)
    assert efficient_backward_bytes(fp32) == 8 * 4096 * 4 + 8 * 4096 * 64 * 4


CASES = [
    dict(),
    dict(dtype=FP32),
    dict(mask=True),
    dict(dtype=FP32, mask=True),
    dict(shape=(1, 1, 4096, 512)),
    dict(shape=(2, 2, 4, 256, 64)),
    dict(shape=(8, 256, 64)),
    dict(shape=(2, 4, 1000, 20)),
    dict(shape=(2, 4, 1000, 20), mask=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table_is_what_the_gpu_takes_and_holds(gpu, case, grad):
    shape, dtype = case.get("shape", (1, 8, 4096, 64)), case.get("dtype", BF16)
    rows = (shape[-2], shape[-2]) if case.get("mask") else None
    tensors = [torch.rand(shape, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3)]
    mask = None if rows is None else torch.zeros(rows, device="cuda", dtype=dtype)
    chosen = SDPBackend(torch._fused_sdp_choice(*tensors, mask, 0.0, False))
    # Handles, plans and workspaces are made once, those of autograd's own thread as well.
    out = F.scaled_dot_product_attention(*tensors, mask)
    if grad:
        torch.autograd.grad(out, tensors, torch.empty_like(out))
    del out
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = F.scaled_dot_product_attention(*tensors, mask)
    forward = torch.cuda.max_memory_allocated() - base
    if grad:
        out.backward(torch.empty_like(out))
    peak = torch.cuda.max_memory_allocated() - base
    name, expected_forward, _, expected_peak = bytes_of(gpu, shape, dtype, grad=grad, mask=rows)
    assert name == chosen.name.removesuffix("_ATTENTION").lower()
    assert forward == pytest.approx(expected_forward, rel=0.05, abs=MIB)
    assert peak == pytest.approx(max(expected_forward, expected_peak), rel=0.15, abs=MIB)
