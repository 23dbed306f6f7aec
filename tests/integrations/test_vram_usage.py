"""The seed's call: kernels forced in the trace, savings against what PyTorch does."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import ModelError, UsageError, estimate_vram_usage
from lowtide.attention.sdpa_rules import cudnn_version, prefers_cudnn, torch_release
from lowtide.integrations.vram_usage import BACKENDS, GB
from lowtide.memory.prediction.estimate import estimate, traced_estimate
from lowtide.memory.profiles import load_profile
from lowtide.memory.tracing.steps import TrainingStep
from lowtide.memory.training.meta_build import build_on_meta, image_channels, make_inputs
from lowtide.models import memory_efficient_attention
from lowtide.models.ldm4ts import LDM4TSModel

GPU = load_profile("rtx3060-12gb")
KEYS = {
    "total_estimated_gb",
    "total_upper_gb",
    "savings_vs_default_pct",
    "ledger",
    "notes",
}
SIZE = (64, 64)


class Attend(nn.Module):
    """Self-attention over the pixels of an image; ``turned`` leaves heads with a stride."""

    def __init__(self, heads: int, width: int, turned: bool = False) -> None:
        super().__init__()
        self.heads, self.turned = heads, turned
        self.into = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, columns = x.shape
        parts = self.into(x.flatten(2).mT).view(batch, -1, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if self.turned:
            q = q.mT.contiguous().mT
        return F.scaled_dot_product_attention(q, k, v).mT.reshape(batch, width, height, columns) + x


class Net(nn.Module):
    """A convolution, then blocks of attention with heads of 32 and, if asked for, one of 512."""

    def __init__(self, wide: bool = False, turned: bool = False) -> None:
        super().__init__()
        width = 512 if wide else 64
        self.first = nn.Conv2d(3, width, 3, padding=1)
        layers = [nn.Sequential(Attend(width // 32, width, turned), nn.SiLU()) for _ in range(3)]
        layers += [nn.Sequential(Attend(1, width), nn.SiLU())] if wide else []
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def usage(**options: Any) -> dict[str, Any]:
    return estimate_vram_usage(**{"model": Net, "image_size": SIZE, "batch_size": 2, **options})


def test_the_documented_call() -> None:
    found = estimate_vram_usage(
        batch_size=4, backend="flash", gradient_checkpointing=True, model=Net(), image_size=SIZE
    )
    assert set(found) == KEYS
    assert 0 < found["total_estimated_gb"] <= found["total_upper_gb"]
    text = f"{found['total_estimated_gb']:.1f} GB, {found['savings_vs_default_pct']:.0f}%"
    assert text.endswith("%")
    total = sum(row["value"] for row in found["ledger"])
    assert found["total_estimated_gb"] == total / GB
    assert found["total_upper_gb"] == sum(row["upper"] for row in found["ledger"]) / GB
    assert "a GB is 10^9 bytes" in found["notes"]


def test_without_a_model_it_is_ldm4ts_at_the_size_of_the_images() -> None:
    size = (16, 24)
    model = LDM4TSModel(size, horizons=(15, 60, 240))
    held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    found = estimate_vram_usage(batch_size=1, image_size=size)
    (weights,) = (row["value"] for row in found["ledger"] if row["name"] == "weights")
    assert weights == pytest.approx(held, rel=0.01)
    with pytest.raises(UsageError, match="multiples of 8"):
        estimate_vram_usage(image_size=(30, 30))


@pytest.mark.slow
def test_the_documented_call_without_a_model() -> None:
    assert memory_efficient_attention.estimate_vram_usage is estimate_vram_usage
    found = memory_efficient_attention.estimate_vram_usage(
        batch_size=4, backend="flash", gradient_checkpointing=True
    )
    assert 0.1 < found["total_estimated_gb"] < 1
    assert 0 < found["savings_vs_default_pct"] < 10
    model = LDM4TSModel((224, 224), [15, 60, 240], 1000)
    named = {"model": model, "backend": "flash", "image_size": (224, 224)}
    assert usage(batch_size=4, gradient_checkpointing=True, **named) == found


def test_figures_are_those_of_a_traced_step() -> None:
    size = (128, 128)  # on less, what is saved is lost among the workspaces' and the allocator's
    step = TrainingStep(
        (torch.empty(2, 3, *size, device="meta"),),
        optimizer="adamw-foreach",
        autocast=torch.bfloat16,
    )
    plain = traced_estimate(Net(), step, GPU)
    assert usage(image_size=size)["total_estimated_gb"] == plain.predicted_bytes / GB
    full = traced_estimate(Net(), dataclasses.replace(step, checkpointing="full"), GPU)
    found = usage(image_size=size, gradient_checkpointing=True)
    assert found["total_estimated_gb"] == full.predicted_bytes / GB
    saved = 100 * (1 - full.predicted_bytes / plain.predicted_bytes)
    assert math.isclose(found["savings_vs_default_pct"], saved)
    assert saved > 5
    exact = estimate(Net(), dataclasses.replace(step, autocast=None), device=GPU)
    found = usage(image_size=size, dtype=torch.float32)
    assert found["total_estimated_gb"] == exact.predicted_bytes / GB


def test_flash_saves_nothing_where_pytorch_takes_it_anyway() -> None:
    found = usage(backend="flash")
    assert found["savings_vs_default_pct"] == 0
    assert "attention calls by PyTorch's own choice on rtx3060-12gb: flash 3" in found["notes"]


def test_math_holds_the_scores() -> None:
    tokens = SIZE[0] * SIZE[1]
    scores = 2 * 2 * tokens * tokens * 2  # batch, heads, bf16
    more = usage(backend="math")["total_estimated_gb"] - usage()["total_estimated_gb"]
    assert more * GB > 3 * scores
    assert usage(backend="math")["savings_vs_default_pct"] < 0


def test_efficient_is_the_default_in_fp32() -> None:
    found = usage(backend="efficient", dtype=torch.float32)
    assert found["savings_vs_default_pct"] == 0
    assert any("efficient 3" in note for note in found["notes"])


def test_cudnn_is_taken_where_it_is_tried() -> None:
    if not prefers_cudnn((9, 0), torch_release(), cudnn_version()):
        with pytest.raises(UsageError, match=r"supports none .* not tried on this GPU"):
            usage(backend="cudnn", device="h200-141gb")
        return
    notes = usage(backend="cudnn", device="h200-141gb")["notes"]
    assert "attention calls by PyTorch's own choice on h200-141gb: cudnn 3" in notes


def test_checkpointing_does_not_count_a_call_twice() -> None:
    found = usage(gradient_checkpointing=True)
    assert any(note.endswith("flash 3") for note in found["notes"])


def test_a_backend_that_refuses_some_calls_says_which_and_why() -> None:
    found = usage(backend="flash", model=lambda: Net(wide=True), image_size=(16, 16))
    assert (
        "flash does not support 1 of 4 calls, which use efficient: the head dimension is over 256"
        in found["notes"]
    )


def test_a_backend_that_takes_nothing_is_refused() -> None:
    with pytest.raises(
        UsageError, match="flash attention supports none of this model's 3"
    ) as error:
        usage(backend="flash", dtype=torch.float32)
    assert "the dtype is not fp16 or bf16" in error.value.message
    for backend in ("flash", "efficient"):
        with pytest.raises(UsageError, match="the last dimension is not contiguous"):
            usage(backend=backend, model=lambda: Net(turned=True))


def test_a_model_without_attention_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3))
    for backend in BACKENDS:
        found = usage(model=model, backend=backend)
        assert found["savings_vs_default_pct"] == 0
        assert any("never calls scaled_dot_product_attention" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({"backend": "sage"}, "no backward pass", "flash"),
        ({"backend": "xformers"}, "'xformers' is not known", "default, sdpa, flash"),
        ({"device": "gtx99"}, "no device profile", ""),
        ({"device": "cpu"}, "no dedicated memory", "lowtide.estimate"),
        ({"batch_size": 0}, "are not a valid batch", ""),
        ({"image_size": (0, 4)}, "are not a valid batch", ""),
    ],
)
def test_invalid_arguments(options: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        usage(**options)
    assert hint in (error.value.hint or "")


def test_a_model_that_cannot_be_traced() -> None:
    with pytest.raises(ModelError, match="a training step of Net cannot be traced"):
        usage(inputs=lambda batch, size: (torch.empty(batch, 5, *size),))


def test_the_switches_of_attention_are_left_as_they_were() -> None:
    cuda = torch.backends.cuda
    before = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    usage(backend="math")
    with pytest.raises(UsageError):
        usage(backend="flash", dtype=torch.float32)
    after = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    assert after == before


class Reader(nn.Module):
    """Reads a number when it is built, which the meta device does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()
        self.layer = nn.Linear(2, 2)


def test_functions_are_built_without_memory_where_possible() -> None:
    assert all(weight.is_meta for weight in build_on_meta(Net).parameters())
    assert not any(weight.is_meta for weight in build_on_meta(Reader).parameters())
    model = Net()
    assert build_on_meta(model) is model
    with pytest.raises(ModelError, match="returned a dict"):
        build_on_meta(dict)  # type: ignore[arg-type]


def test_inputs_come_from_the_model_the_caller_or_the_first_convolution() -> None:
    assert image_channels(Net()) == 3
    assert make_inputs(Net(), 2, (4, 6))[0].shape == (2, 3, 4, 6)
    tensor = torch.empty(1)
    assert make_inputs(Net(), 2, (4, 6), lambda batch, size: tensor) == (tensor,)  # type: ignore[arg-type, return-value]

    class Own(nn.Module):
        def example_inputs(self, batch: int, size: tuple[int, int]) -> list[Tensor]:
            return [torch.empty(batch, *size), torch.empty(batch)]

    assert [t.shape for t in make_inputs(Own(), 2, (4, 6))] == [(2, 4, 6), (2,)]
    with pytest.raises(UsageError, match="no convolution") as error:
        make_inputs(nn.Linear(2, 2), 1, (4, 4))
    assert "example_inputs(batch, (height, width))" in (error.value.hint or "")
