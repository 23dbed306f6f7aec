"""Which kernel attention uses on a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version

from lowtide.attention.sdpa_rules import (
    cudnn_version,
    kernel_unsupported_reason,
    prefers_cudnn,
    sdpa_kernel_for,
    torch_release,
)
from lowtide.attention.spec import AttentionCall
from lowtide.core.units import GIB
from lowtide.memory.profiles.profile import GpuDriverFacts, profile_from_driver
from support.gpu_attention import (
    ADA,
    AMPERE,
    BF16,
    BLACKWELL,
    FP16,
    FP32,
    HOPPER,
    HOST,
    Live,
    path,
    qkv,
)


@pytest.mark.parametrize(
    ("expected", "profile", "options"),
    [
        pytest.param("flash", AMPERE, {}, id="bf16 without mask"),
        pytest.param("flash", ADA, dict(head_dim=20), id="any head dim, by padding"),
        pytest.param("flash", BLACKWELL, dict(head_dim=256), id="head dim 256 is the last"),
        pytest.param("efficient", AMPERE, dict(head_dim=512), id="VAE bottleneck: too wide"),
        pytest.param("efficient", AMPERE, dict(dtype=FP32), id="flash has no fp32"),
        pytest.param("efficient", AMPERE, dict(has_mask=True), id="flash has no mask"),
        pytest.param(
            "efficient",
            AMPERE,
            dict(has_mask=True, mask_needs_grad=True, needs_grad=True),
            id="a learned bias gets its gradient",
        ),
        pytest.param(
            "efficient",
            ADA,
            dict(head_dim=208, needs_grad=True),
            id="no flash backward of 193 to 224 on consumer GPUs",
        ),
        pytest.param("flash", ADA, dict(head_dim=208), id="forward alone takes 208"),
        pytest.param("flash", ADA, dict(head_dim=256, needs_grad=True), id="256 has a backward"),
        pytest.param(
            "efficient",
            ADA,
            dict(head_dim=256, needs_grad=True, dropout=0.1),
            id="256 has no backward with dropout",
        ),
        pytest.param(
            "efficient",
            AMPERE,
            dict(is_causal=True, key_tokens=77),
            id="causal wants equal tokens for flash",
        ),
        pytest.param(
            "efficient",
            AMPERE,
            dict(head_dim=64, value_head_dim=128),
            id="flash wants one head dim",
        ),
        pytest.param(
            "math", AMPERE, dict(head_dim=20, has_mask=True), id="20 is no multiple of 8 for a mask"
        ),
        pytest.param("efficient", AMPERE, dict(head_dim=20, dtype=FP32), id="20 is one of 4"),
        pytest.param("math", AMPERE, dict(head_dim=18, dtype=FP32), id="18 is none"),
        pytest.param("math", AMPERE, dict(dims=5), id="windows in a fifth dimension"),
        pytest.param("math", AMPERE, dict(dims=2), id="no heads, no batch"),
        pytest.param("math", AMPERE, dict(dtype=torch.float64), id="fp64"),
        pytest.param("cpu_flash", HOST, dict(dtype=FP32, has_mask=True), id="the CPU's own"),
        pytest.param("math", HOST, dict(dropout=0.1), id="not with dropout on the CPU"),
        pytest.param(
            "math",
            HOST,
            dict(has_mask=True, mask_needs_grad=True),
            id="not with a learned bias on the CPU",
        ),
    ],
)
def test_the_kernel_is(expected, profile, options):
    assert path(profile, **options) == expected


TURING = profile_from_driver(GpuDriverFacts("Tesla T4", (7, 5), 15 * GIB, 40))


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        pytest.param("efficient", dict(dtype=FP16), id="no flash before Ampere"),
        pytest.param("math", dict(dtype=BF16), id="no bf16 before Ampere"),
        pytest.param("efficient", dict(dtype=FP32, head_dim=18), id="fp32 of any width"),
        pytest.param("math", dict(dtype=FP16, head_dim=20), id="fp16 in multiples of 8"),
    ],
)
def test_before_ampere_the_kernel_is(expected, options):
    assert path(TURING, **options) == expected


def call(**changes):
    plain = AttentionCall(dtype=BF16, head_dim=64, query_tokens=64, key_tokens=64)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        pytest.param("math", dict(has_unit_stride=False), id="head dim not contiguous"),
        pytest.param("math", dict(is_uniform=False), id="broadcast batch"),
        pytest.param("math", dict(query_tokens=0), id="no tokens"),
        pytest.param("flash", dict(heads=8, key_heads=2), id="grouped heads"),
        pytest.param("math", dict(heads=8, key_heads=2, has_mask=True), id="grouped, with a mask"),
        pytest.param("math", dict(dtype=FP32, is_aligned=False), id="a slice that is misaligned"),
        pytest.param("efficient", dict(enabled=frozenset({"efficient"})), id="flash switched off"),
        pytest.param("math", dict(enabled=frozenset({"math"})), id="all switched off"),
    ],
)
def test_rarer_conditions_lead_to(expected, changes):
    assert sdpa_kernel_for(AMPERE, call(**changes)) == expected


def test_cudnn_comes_first_on_data_center_gpus_by_version():
    new, old = Version("2.15"), Version("2.10")
    assert prefers_cudnn((9, 0), new, 91900) and prefers_cudnn((10, 3), old, 91501)
    assert not prefers_cudnn((9, 0), new, 91002)  # wheels for CUDA 12 carry an older one
    assert prefers_cudnn((9, 0), Version("2.9"), 91002)
    assert not prefers_cudnn((9, 0), Version("2.8"), 91900)
    assert not prefers_cudnn((12, 0), new, 91900) and not prefers_cudnn((8, 6), new, 91900)


def test_a_refusal_says_why():
    assert kernel_unsupported_reason("flash", AMPERE, call()) is None
    assert kernel_unsupported_reason("flash", AMPERE, call(has_mask=True)) == "there is a mask"
    assert kernel_unsupported_reason("flash", AMPERE, call(enabled=frozenset())) == "it is disabled"
    assert (
        kernel_unsupported_reason("cudnn", HOPPER, call(head_dim=20))
        == "a head dimension is not a multiple of 8"
    )
    assert (
        kernel_unsupported_reason("cudnn", HOPPER, call(dropout=0.1))
        == "the dropout is not a multiple of 1/16"
    )
    assert (
        kernel_unsupported_reason("cudnn", HOPPER, call(batch=65536))
        == "there are over 65535 batches or heads"
    )
    assert (
        kernel_unsupported_reason("cudnn", AMPERE, call(head_dim=136))
        == "a head dimension is too large"
    )
    assert (
        kernel_unsupported_reason("cudnn", HOPPER, call(key_tokens=1)) == "there is only one token"
    )


@pytest.mark.grid(5)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 2, 8, 16), (2, 8, 16), (1, 2, 2, 8, 16)])
@pytest.mark.parametrize(
    "options",
    [{}, dict(mask=(8, 8)), dict(mask=(8, 8), learned=True), dict(dropout=0.5), dict(value_dim=24)],
    ids=str,
)
def test_the_cpu_table_is_what_pytorch_chooses(dtype, shape, options):
    tensors = qkv(shape, dtype, value_dim=options.get("value_dim"))
    mask = options.get("mask") and torch.zeros(options["mask"], dtype=dtype)
    if options.get("learned"):
        mask.requires_grad_()
    with Live() as live:
        F.scaled_dot_product_attention(*tensors, mask, options.get("dropout", 0.0))
    fused = "_scaled_dot_product_flash_attention_for_cpu.default" in live.ops
    assert ("cpu_flash" if fused else "math") == path(
        HOST,
        dtype=dtype,
        head_dim=16,
        tokens=8,
        dims=len(shape),
        has_mask=mask is not None,
        mask_needs_grad="learned" in options,
        dropout=options.get("dropout", 0.0),
        value_head_dim=options.get("value_dim"),
    )


def test_the_versions_are_those_installed():
    assert torch_release() >= Version("2.8") and 90000 < cudnn_version() < 200000
