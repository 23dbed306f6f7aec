"""Device profiles: their data, the kernel that attention takes on them, and what it holds."""

import json
import subprocess
import sys
import weakref
from dataclasses import replace
from importlib import resources

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from pydantic import ValidationError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lowtide.attention.call import AttentionCall
from lowtide.attention.sdpa_rules import (
    installed_versions,
    path_of,
    prefers_cudnn,
    promotes_three_dimensions,
    refusal,
)
from lowtide.core.errors import UsageError
from lowtide.core.units import GIB, MIB
from lowtide.memory.measuring.live import live_peak_bytes
from lowtide.memory.meter import total_host_bytes
from lowtide.memory.profiles import DeviceProfile, load_profile, profile_names, profile_of
from lowtide.memory.profiles.attention import attention_as_on, attention_path
from lowtide.memory.profiles.attention_scratch import (
    AttentionShape,
    efficient_backward_bytes,
    efficient_forward_bytes,
    flash_backward_bytes,
    flash_forward_bytes,
)
from lowtide.memory.profiles.present import DeviceFacts, architecture_of, profile_from_facts
from lowtide.memory.profiles.profile import FIGURES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMPERE, ADA, HOPPER, BLACKWELL, HOST = (
    load_profile(name) for name in ("rtx3060", "rtx4090", "h200", "rtx5070ti", "cpu")
)
FILES = sorted(
    entry.name for entry in (resources.files("lowtide.memory.profiles") / "data").iterdir()
)


# The data


def read(file: str) -> dict:
    return json.loads((resources.files("lowtide.memory.profiles") / "data" / file).read_text())


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_a_profile_of_that_name_with_provenance(file):
    profile = DeviceProfile.model_validate(read(file))
    assert file == f"{profile.name}.json" and profile.name in profile_names()
    needed = set(FIGURES) - ({"pcie_bytes_per_s"} if profile.kind == "cpu" else set())
    assert set(profile.provenance) == needed
    assert profile.provenance["context_bytes"].kind == (
        "known" if profile.kind == "cpu" else "prior"
    )


@pytest.mark.parametrize("figure", ["total_bytes", "flops", "workspaces.conv"])
def test_a_figure_without_provenance_is_refused(figure):
    data = read("rtx4090-24gb.json")
    del data["provenance"][figure]
    with pytest.raises(ValidationError, match=figure):
        DeviceProfile.model_validate(data)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(supports=["fp32"]), "flops must be given"),
        (dict(context_upper_bytes=1), "context_upper_bytes is below"),
        (dict(desktop_upper_bytes=1), "desktop_upper_bytes is below"),
        (dict(kind="cpu"), "compute_capability belongs"),
        (dict(memory="24 GB"), "Extra inputs"),
    ],
)
def test_contradictions_are_refused(change, complaint):
    with pytest.raises(ValidationError, match=complaint):
        DeviceProfile.model_validate({**read("rtx4090-24gb.json"), **change})


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "cpu"])
def test_cards_are_sensible(name):
    card = load_profile(name)
    nominal = int(name.rpartition("-")[2].removesuffix("gb"))
    # The driver keeps up to 5 % for itself; data center cards are sold by powers of ten.
    assert 0.95 * nominal * (GIB if nominal < 100 else 10**9) < card.total_bytes <= nominal * GIB
    assert 200 * MIB <= card.context_bytes <= card.context_upper_bytes <= GIB
    assert card.desktop_upper_bytes + card.context_upper_bytes < 0.4 * card.total_bytes
    assert card.workspaces.cublas_bytes in (8320 * 1024, 32 * MIB)
    assert card.pcie_bytes_per_s and 8 * card.pcie_bytes_per_s < card.bandwidth_bytes_per_s
    # fp32 rate is two operations for each of 128 lanes a cycle, at clocks of 1 to 3 GHz.
    lanes = 2 * 128 * card.multiprocessors
    assert 1e9 < card.flops["fp32"] / lanes < 3e9
    assert card.flops["fp16"] == card.flops["bf16"] >= 2 * card.flops["tf32"]
    assert card.flops["tf32"] >= card.flops["fp32"]


def test_names_are_in_order_of_size_and_found_in_any_spelling():
    assert profile_names()[:2] == ("cpu", "laptop-6gb") and profile_names()[-1] == "h200-141gb"
    spellings = ("rtx4090-24gb", "rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090 24 GB")
    assert {load_profile(text).name for text in spellings} == {"rtx4090-24gb"}
    assert load_profile("h200") is load_profile("H200")


def test_an_unknown_name_lists_the_names_and_the_closest():
    with pytest.raises(UsageError, match="rtx4080") as caught:
        load_profile("rtx4080-16gb")
    assert all(name in caught.value.message for name in profile_names())
    assert caught.value.hint == "did you mean rtx4060-8gb?"
    with pytest.raises(UsageError) as caught:
        load_profile("abacus")
    assert "did you mean" not in caught.value.hint


def test_profiles_are_read_without_torch():
    program = (
        "import sys; from lowtide.memory.profiles import load_profile, profile_of;"
        "load_profile('rtx3060'); profile_of('cpu'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_convolution_scratch_is_a_multiple_with_a_cap():
    space = ADA.workspaces
    assert space.conv_bytes(100 * MIB) == (100 * MIB, 200 * MIB)
    assert space.conv_bytes(100 * MIB, channels_last=True) == (int(12.5 * MIB), 200 * MIB)
    assert space.conv_bytes(9 * GIB) == (space.conv_cap_bytes, space.conv_cap_bytes)
    assert HOPPER.workspaces.blas_bytes == (32 * MIB, 33 * MIB)


# Devices that are there


def test_the_host_is_measured():
    host = profile_of("cpu")
    assert host.total_bytes == total_host_bytes()
    assert host.provenance["total_bytes"].kind == "known"
    assert host.context_bytes == 0 and not host.expandable_segments
    assert host.flops["fp32"] == HOST.flops["fp32"] * host.multiprocessors // HOST.multiprocessors


def test_a_known_card_keeps_its_figures_and_takes_the_drivers_memory():
    facts = DeviceFacts("NVIDIA GeForce RTX 3070", (8, 6), 8 * GIB, 46)
    card = profile_from_facts(facts)
    assert card.name == "rtx3070-8gb" and card.total_bytes == 8 * GIB
    assert card.provenance["total_bytes"].kind == "known"
    assert card.flops == load_profile("rtx3070").flops
    # A card of that name with other memory is another card.
    other = profile_from_facts(replace(facts, total_bytes=16 * GIB))
    assert other.name == "nvidia-geforce-rtx-3070" and other.flops == card.flops


def test_an_unknown_card_takes_scaled_priors_of_the_nearest():
    facts = DeviceFacts("NVIDIA H100 PCIe", (9, 0), 79 * GIB, 114, 2_000_000_000_000)
    card = profile_from_facts(facts)
    assert card.architecture == "hopper" and card.workspaces == HOPPER.workspaces
    assert card.flops["bf16"] == pytest.approx(HOPPER.flops["bf16"] * 114 / 132)
    assert card.bandwidth_bytes_per_s == 2_000_000_000_000
    assert card.provenance["bandwidth_bytes_per_s"].kind == "known"
    assert {card.provenance[f].kind for f in ("flops", "context_bytes")} == {"prior"}


def test_a_card_before_ampere_has_no_bf16():
    card = profile_from_facts(DeviceFacts("Tesla T4", (7, 5), 15 * GIB, 40))
    assert card.architecture == "turing" and card.supports == ("fp32", "fp16")
    assert set(card.flops) == {"fp32", "fp16"}
    assert card.provenance["bandwidth_bytes_per_s"].kind == "prior"
    names = {(6, 1): "pascal", (8, 9): "ada", (10, 3): "blackwell", (13, 0): "blackwell"}
    assert {cap: architecture_of(cap) for cap in names} == names


@pytest.mark.parametrize(
    ("device", "complaint"), [("mps", "no profiles of"), ("cuda:99", "there is no device")]
)
def test_devices_that_are_not_there(device, complaint):
    with pytest.raises(UsageError, match=complaint):
        profile_of(device)


# Which kernel


def path(profile, *, dtype=BF16, head_dim=64, tokens=4096, **options):
    return attention_path(
        profile, dtype=dtype, head_dim=head_dim, query_tokens=tokens,
        key_tokens=options.pop("key_tokens", tokens), **options,
    )  # fmt: skip


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
            "efficient", AMPERE, dict(has_mask=True, mask_needs_grad=True, needs_grad=True),
            id="a learned bias gets its gradient",
        ),
        pytest.param(
            "efficient", ADA, dict(head_dim=208, needs_grad=True),
            id="no flash backward of 193 to 224 on consumer cards",
        ),
        pytest.param("flash", ADA, dict(head_dim=208), id="forward alone takes 208"),
        pytest.param("flash", ADA, dict(head_dim=256, needs_grad=True), id="256 has a backward"),
        pytest.param(
            "efficient", ADA, dict(head_dim=256, needs_grad=True, dropout=0.1),
            id="256 has no backward with dropout",
        ),
        pytest.param(
            "efficient", AMPERE, dict(is_causal=True, key_tokens=77),
            id="causal wants equal tokens for flash",
        ),
        pytest.param(
            "efficient", AMPERE, dict(head_dim=64, value_head_dim=128),
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
            "math", HOST, dict(has_mask=True, mask_needs_grad=True),
            id="not with a learned bias on the CPU",
        ),
    ],
)  # fmt: skip
def test_the_kernel_is(expected, profile, options):
    assert path(profile, **options) == expected


TURING = profile_from_facts(DeviceFacts("Tesla T4", (7, 5), 15 * GIB, 40))


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
    assert path_of(AMPERE, call(**changes)) == expected


def test_cudnn_comes_first_on_data_center_cards_by_version():
    new, old = Version("2.11"), Version("2.10")
    assert prefers_cudnn((9, 0), new, 91900) and prefers_cudnn((10, 3), old, 91501)
    assert not prefers_cudnn((9, 0), old, 91002)  # wheels for CUDA 12 carry an older one
    assert prefers_cudnn((9, 0), Version("2.9"), 91002)
    assert not prefers_cudnn((9, 0), Version("2.8"), 91900)
    assert not prefers_cudnn((12, 0), new, 91900) and not prefers_cudnn((8, 6), new, 91900)


def test_a_refusal_says_why():
    assert refusal("flash", AMPERE, call()) is None
    assert refusal("flash", AMPERE, call(has_mask=True)) == "there is a mask"
    assert refusal("flash", AMPERE, call(enabled=frozenset())) == "it is switched off"
    assert refusal("cudnn", HOPPER, call(head_dim=20)) == "a head dimension is no multiple of 8"
    assert refusal("cudnn", HOPPER, call(dropout=0.1)) == "the dropout is no multiple of 1/16"
    assert refusal("cudnn", HOPPER, call(batch=65536)) == "there are over 65535 batches or heads"
    assert refusal("cudnn", AMPERE, call(head_dim=136)) == "a head dimension is too large"
    assert refusal("cudnn", HOPPER, call(key_tokens=1)) == "there is one token only"


def qkv(shape=(1, 8, 256, 64), dtype=FP32, grad=False, value_dim=None):
    make = lambda size: torch.empty(size, dtype=dtype, requires_grad=grad)  # noqa: E731
    return make(shape), make(shape), make((*shape[:-1], value_dim or shape[-1]))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 2, 8, 16), (2, 8, 16), (1, 2, 2, 8, 16)])
@pytest.mark.parametrize(
    "options", [{}, dict(mask=(8, 8)), dict(mask=(8, 8), learned=True), dict(dropout=0.5),
                dict(value_dim=24)], ids=str,
)  # fmt: skip
def test_the_cpu_table_is_what_pytorch_chooses(dtype, shape, options):
    tensors = qkv(shape, dtype, value_dim=options.get("value_dim"))
    mask = options.get("mask") and torch.zeros(options["mask"], dtype=dtype)
    if options.get("learned"):
        mask.requires_grad_()
    with Live() as live:
        F.scaled_dot_product_attention(*tensors, mask, options.get("dropout", 0.0))
    fused = "_scaled_dot_product_flash_attention_for_cpu.default" in live.ops
    assert ("cpu_flash" if fused else "math") == path(
        HOST, dtype=dtype, head_dim=16, tokens=8, dims=len(shape), has_mask=mask is not None,
        mask_needs_grad="learned" in options, dropout=options.get("dropout", 0.0),
        value_head_dim=options.get("value_dim"),
    )  # fmt: skip


# What it holds


class Live(TorchDispatchMode):
    """Bytes of all storages alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known, self.ops = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.ops.append(func.__name__)
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return result

    def gone(self, key, size):
        self.known.discard(key)
        self.now -= size


def bytes_of(profile, shape, dtype, *, grad=False, mask=None, scratch=True, options=None):
    """(Kernel, peak forward, kept for backward, peak backward), above query, key and value."""
    with FakeTensorMode(), Live() as live, attention_as_on(profile, scratch=scratch) as log:
        tensors = qkv(shape, dtype, grad)
        bias = None if mask is None else torch.empty(mask, dtype=dtype)
        base = live.now
        out = F.scaled_dot_product_attention(*tensors, bias, **(options or {}))
        forward, kept, live.peak = live.peak - base, live.now - base, live.now
        assert out.shape == shape and out.dtype == dtype
        if grad:
            out.backward(torch.empty_like(out))
            assert [t.grad.shape for t in tensors] == [t.shape for t in tensors]
        (taken,) = log.paths or ("cpu_flash",)
        return taken, forward, kept, live.peak - base


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
    bare = bytes_of(AMPERE, SHAPE, BF16, grad=True, scratch=False)[3]
    assert bare == near(kept + OUT + 3 * OUT)  # the incoming gradient and three outgoing ones
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
    with FakeTensorMode(), Live() as live, attention_as_on(AMPERE):
        query, key, value = qkv(SHAPE, BF16)
        mask = torch.empty(4096, 4096, dtype=torch.bool)
        base = live.now
        F.scaled_dot_product_attention(query, key, value, mask)
    assert live.peak - base == pytest.approx(4096 * 4096 * 2 + OUT, rel=0.01)


def test_a_learned_bias_keeps_the_fused_kernel_on_cards_and_loses_it_on_the_cpu():
    paths = {}
    for profile in (AMPERE, HOST):
        with FakeTensorMode(), Live() as live, attention_as_on(profile):
            bias = torch.zeros(8, 256, 256, dtype=FP32, requires_grad=True)
            F.scaled_dot_product_attention(*qkv(grad=True), bias[None]).sum().backward()
            assert bias.grad.shape == bias.shape
        paths[profile.name] = " ".join(live.ops)
    assert "efficient_attention_backward" in paths["rtx3060-12gb"]
    assert "safe_softmax" in paths["cpu"] and "flash" not in paths["cpu"]


def test_three_dimensions_are_what_this_release_makes_of_them():
    with FakeTensorMode(), attention_as_on(AMPERE) as log:
        query, key, value = qkv((8, 256, 64), BF16, grad=True)
        for mask in (None, torch.empty(256, 256, dtype=BF16), torch.empty(8, 256, 256, dtype=BF16)):
            out = F.scaled_dot_product_attention(query, key, value, mask)
            assert out.shape == query.shape
            out.sum().backward()
    with Live() as live:
        F.scaled_dot_product_attention(*qkv((2, 8, 16)))
    fused = any("flash_attention_for_cpu" in op for op in live.ops)
    assert dict(log.paths) == ({"flash": 1, "efficient": 2} if fused else {"math": 3})


def test_the_question_about_three_dimensions_is_not_answered_by_a_fake_tensor():
    outside = promotes_three_dimensions()
    promotes_three_dimensions.cache_clear()
    with FakeTensorMode(), Live() as live, attention_as_on(AMPERE):
        assert promotes_three_dimensions() == outside
    assert live.ops == []


def test_grouped_heads_take_flash():
    with FakeTensorMode(), attention_as_on(AMPERE) as log:
        query = torch.empty(1, 8, 256, 64, dtype=BF16, requires_grad=True)
        key = torch.empty(1, 2, 256, 64, dtype=BF16, requires_grad=True)
        out = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        out.sum().backward()
        assert out.shape == query.shape and key.grad.shape == key.shape
    assert dict(log.paths) == {"flash": 1}


def test_autocast_decides_before_the_kernel_is_chosen():
    with FakeTensorMode(), attention_as_on(AMPERE) as log:
        with torch.autocast("cpu", dtype=BF16):
            assert F.scaled_dot_product_attention(*qkv()).dtype == BF16
        assert F.scaled_dot_product_attention(*qkv()).dtype == FP32
    assert dict(log.paths) == {"flash": 1, "efficient": 1}


@pytest.mark.parametrize("attend", [
    F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
], ids=lambda f: f.__name__)  # fmt: skip
def test_however_it_is_called(attend):
    with FakeTensorMode(), Live() as live, attention_as_on(AMPERE) as log:
        attend(*qkv(dtype=BF16))
    assert dict(log.paths) == {"flash": 1}
    assert any("_scaled_dot_product_flash_attention.default" in op for op in live.ops)


@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention_is_covered(training):
    with FakeTensorMode(), attention_as_on(AMPERE) as log:
        layer = nn.MultiheadAttention(64, 4, batch_first=True, dtype=BF16).train(training)
        tokens = torch.empty(2, 256, 64, dtype=BF16)
        with torch.set_grad_enabled(training):
            out, _ = layer(tokens, tokens, tokens, need_weights=False)
        assert out.shape == tokens.shape
        if training:
            out.sum().backward()
            assert layer.in_proj_weight.grad.shape == layer.in_proj_weight.shape
    assert dict(log.paths) == {"flash": 1}


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
    with FakeTensorMode(), attention_as_on(AMPERE) as log:
        tensors = qkv(dtype=BF16, grad=True)
        attend = lambda *qkv: F.scaled_dot_product_attention(*qkv)  # noqa: E731
        out = checkpoint(attend, *tensors, use_reentrant=reentrant)
        differentiate(out.sum(), tensors)
    assert dict(log.paths) == {"flash": 2}


def test_outside_everything_is_as_before_and_real_tensors_are_refused():
    query, key, value = (torch.rand(1, 2, 8, 16) for _ in range(3))
    before = F.scaled_dot_product_attention(query, key, value)
    with attention_as_on(AMPERE), pytest.raises(TypeError, match="fake tensors"):
        F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(F.scaled_dot_product_attention(query, key, value), before)
    with attention_as_on(HOST):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), before)


def test_scratch_by_hand():
    shape = AttentionShape(1, 8, 4096, 4096, 64, 64, 2)
    assert flash_forward_bytes(shape, 28) == 0  # 512 blocks of rows fill 56 slots
    assert flash_backward_bytes(shape) == 8 * 4096 * (64 + 1) * 4
    assert efficient_forward_bytes(shape) == 0
    assert efficient_backward_bytes(shape) == 8 * 4096 * 4 + 8 * 4096 * 64 * 4
    # One head: 64 blocks of rows on 264 slots, which 4 splits of the keys fill to 97 %.
    single = replace(shape, heads=1)
    assert flash_forward_bytes(single, 132) == 4 * 4096 * 65 * 4
    assert flash_forward_bytes(replace(single, has_dropout=True), 132) == 0
    grouped = replace(shape, is_grouped=True)
    assert flash_backward_bytes(grouped) - flash_backward_bytes(shape) == 2 * 8 * 4096 * 64 * 2
    fp32 = replace(shape, element_bytes=4)
    assert efficient_backward_bytes(fp32) == 8 * 4096 * 4 + 8 * 4096 * 64 * 4


# On a real card


@pytest.fixture
def card():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return profile_of("cuda:0")


@pytest.mark.gpu
def test_the_card_is_recognized(card):
    properties = torch.cuda.get_device_properties(0)
    assert card.total_bytes == properties.total_memory
    assert card.capability == (properties.major, properties.minor)


CASES = [
    dict(), dict(dtype=FP32), dict(mask=True), dict(dtype=FP32, mask=True),
    dict(shape=(1, 1, 4096, 512)), dict(shape=(2, 2, 4, 256, 64)), dict(shape=(8, 256, 64)),
    dict(shape=(2, 4, 1000, 20)), dict(shape=(2, 4, 1000, 20), mask=True),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table_is_what_the_card_takes_and_holds(card, case, grad):
    shape, dtype = case.get("shape", (1, 8, 4096, 64)), case.get("dtype", BF16)
    rows = (shape[-2], shape[-2]) if case.get("mask") else None
    tensors = [torch.rand(shape, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3)]
    mask = None if rows is None else torch.zeros(rows, device="cuda", dtype=dtype)
    chosen = SDPBackend(torch._fused_sdp_choice(*tensors, mask, 0.0, False))
    F.scaled_dot_product_attention(*tensors, mask)  # handles and plans are made once
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = F.scaled_dot_product_attention(*tensors, mask)
    forward = torch.cuda.max_memory_allocated() - base
    if grad:
        out.backward(torch.empty_like(out))
    peak = torch.cuda.max_memory_allocated() - base
    name, expected_forward, _, expected_peak = bytes_of(card, shape, dtype, grad=grad, mask=rows)
    assert name == chosen.name.removesuffix("_ATTENTION").lower()
    assert forward == pytest.approx(expected_forward, rel=0.05, abs=MIB)
    assert peak == pytest.approx(max(expected_forward, expected_peak), rel=0.15, abs=MIB)


def test_versions_are_those_installed():
    release, cudnn = installed_versions()
    assert release >= Version("2.8") and 90000 < cudnn < 200000
