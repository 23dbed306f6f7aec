"""A fake trace holds the bytes of the real run, to the byte."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.tracing.fake import model_tensors
from lowtide.memory.tracing.fake_fixes import pointwise_strides, view_strides
from lowtide.memory.tracing.steps import InferenceStep, Step, TrainingStep, input_tensors
from lowtide.memory.tracing.trace import MemoryTracer


def real_trace(model: nn.Module, step: Step):
    run, tracer = step.prepare(model), MemoryTracer()
    tracer.label(model_tensors(model), "weights")
    tracer.label(input_tensors(step), "inputs")
    with tracer:
        run(tracer)
    return tracer.trace


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.attend = nn.Linear(width, 3 * width)

    def forward(self, x):
        x = x + self.conv(F.silu(self.norm(x)))
        batch, width, height, columns = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.attend(tokens).view(batch, -1, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, width)
        # With one image in the batch this view is where fake and real strides part.
        return x + out.transpose(1, 2).view(batch, width, height, columns)


class Net(nn.Module):
    """Convolution, normalization, attention, resampling, in a list of like blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.last = nn.Conv2d(width, 12, 3, padding=1)
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))

    def forward(self, x):
        x = self.first(x - self.mean)
        for block in self.blocks:
            x = block(x)
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return F.pixel_shuffle(self.last(F.leaky_relu(x, 0.1)), 2)


def images(batch: int = 1, side: int = 24) -> torch.Tensor:
    return torch.rand(batch, 3, side, side + 8)


STEPS: dict[str, Step] = {
    "inference": InferenceStep((images(),)),
    "inference of two": InferenceStep((images(2),)),
    "inference, autocast": InferenceStep((images(),), autocast=torch.bfloat16),
    "training": TrainingStep((images(),)),
    "training of two": TrainingStep((images(2),)),
    "full checkpointing": TrainingStep((images(),), checkpointing="full"),
    "selective checkpointing": TrainingStep((images(),), checkpointing="selective"),
    "autocast": TrainingStep((images(),), autocast=torch.bfloat16),
    "sgd": TrainingStep((images(),), optimizer="sgd"),
    "momentum": TrainingStep((images(),), optimizer="sgd-momentum"),
    "fused": TrainingStep((images(),), optimizer="adamw-fused"),
    "accumulation and average": TrainingStep((images(),), accumulate=2, ema=True),
    "validation": TrainingStep((images(1, 16),), validation=(images(2, 48),)),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", STEPS)
def test_fake_bytes_are_the_real_ones(name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    fake = trace_step(model, STEPS[name])
    real = real_trace(model, STEPS[name])
    assert fake.peak_bytes == real.peak_bytes
    assert fake.live_at_peak() == real.live_at_peak()
    assert list(fake.live_bytes())[-1] == list(real.live_bytes())[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_type_is_that_of_a_converted_model(dtype: torch.dtype) -> None:
    fake = trace_step(Net(), STEPS["inference"], dtype=dtype)
    converted = InferenceStep((images().to(dtype),))
    assert fake.peak_bytes == real_trace(Net().to(dtype), converted).peak_bytes


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("side", [17, 24])
def test_memory_format_is_followed(layout: torch.memory_format, side: int) -> None:
    model = Net().to(memory_format=layout)
    step = TrainingStep((images(1, side).contiguous(memory_format=layout),))
    assert trace_step(model, step).peak_bytes == real_trace(model, step).peak_bytes


@pytest.mark.grid(4)
@pytest.mark.parametrize("family", ["drct", "swinir", "hat"])
@pytest.mark.parametrize("how", ["inference", "none", "full"])
def test_architectures_of_the_upscaling_world(family: str, how: str) -> None:
    model = _architecture(family)
    inputs = (torch.rand(1, 3, 32, 32),)
    step: Step = InferenceStep(inputs)
    if how != "inference":
        step = TrainingStep(inputs, checkpointing=how)  # type: ignore[arg-type]
    assert trace_step(model, step).peak_bytes == real_trace(model, step).peak_bytes


def _architecture(family: str) -> nn.Module:
    sizes: dict = dict(embed_dim=60, depths=(2, 2), num_heads=(2, 2), upscale=2)
    if family == "drct":
        from spandrel.architectures.DRCT.__arch.drct_arch import DRCT

        return DRCT(img_size=32, window_size=8, gc=8, upsampler="pixelshuffle", **sizes)
    if family == "swinir":
        from spandrel.architectures.SwinIR.__arch.SwinIR import SwinIR

        return SwinIR(img_size=32, window_size=8, upsampler="pixelshuffledirect", **sizes)
    from spandrel.architectures.HAT.__arch.HAT import HAT

    return HAT(img_size=32, window_size=8, upsampler="pixelshuffle", **sizes)


def test_nothing_of_the_model_changes() -> None:
    model = Net()
    before = {name: (id(value), value.clone()) for name, value in model.state_dict().items()}
    trace_step(model, STEPS["full checkpointing"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name][1])
    assert "forward" not in vars(model.blocks[0])
    assert all(weight.grad is None for weight in model.parameters())


def test_a_model_on_meta_needs_no_bytes() -> None:
    with torch.device("meta"):
        model, inputs = Net(32), torch.empty(1, 3, 64, 64)
    trace = trace_step(model, TrainingStep((inputs,)))
    assert trace.live_at_peak()["weights"] == sum(p.nbytes for p in model_tensors(model))


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x))

    model, step = Tied(), InferenceStep((torch.rand(2, 64),))
    assert trace_step(model, step).live_at_peak()["weights"] == 64 * 64 * 4
    assert trace_step(model, step).peak_bytes == real_trace(model, step).peak_bytes


def test_checkpointing_takes_less_and_phases_are_named() -> None:
    model, inputs = Net(32), (images(1, 64),)
    whole = trace_step(model, TrainingStep(inputs))
    saved = trace_step(model, TrainingStep(inputs, checkpointing="full"))
    some = trace_step(model, TrainingStep(inputs, checkpointing="selective"))
    assert saved.peak_bytes < some.peak_bytes < whole.peak_bytes
    assert [name for _, name in whole.marks] == ["forward", "backward", "optimizer"]
    assert whole.phase(whole.peak_op()) in ("forward", "backward")


def test_checkpointing_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model, gradients = Net(), []
    for how in ("none", "full", "selective"):
        step = dataclasses.replace(STEPS["training"], checkpointing=how)  # type: ignore[type-var]
        step._forward_backward(model, MemoryTracer())  # type: ignore[union-attr]
        gradients.append([weight.grad.clone() for weight in model.parameters()])  # type: ignore[union-attr]
        model.zero_grad()
    for other in gradients[1:]:
        assert all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))


def test_storages_are_counted_once_and_followed_to_their_end() -> None:
    def work() -> None:
        first = torch.zeros(1000)
        second = first.view(10, 100)[2:]  # no storage of its own
        first = second * 2
        del second
        torch.ones(1, dtype=torch.uint8)

    tracer = MemoryTracer()
    with tracer:
        work()
    trace = tracer.trace
    assert trace.peak_bytes == 4000 + 3200
    assert list(trace.live_bytes())[-1] == 0


@pytest.mark.parametrize(
    ("shape", "stride", "target"),
    [
        ((1, 256, 256), (65536, 1, 256), (1, 256, 16, 16)),
        ((2, 3, 4), (12, 4, 1), (6, 4)),
        ((2, 3, 4), (12, 4, 1), (24,)),
        ((1, 4, 4), (16, 1, 4), (4, 4)),
        ((6,), (2,), (2, 3)),
        ((1, 1, 5), (5, 5, 1), (5, 1, 1)),
    ],
)
def test_views_get_the_strides_of_real_ones(shape, stride, target) -> None:
    real = torch.empty_strided(shape, stride).view(target)
    assert view_strides(shape, stride, target) == list(real.stride())


def test_a_view_that_cannot_be_has_no_strides() -> None:
    assert view_strides((2, 3), (1, 2), (6,)) is None


@pytest.mark.parametrize("stride", [(256, 1, 4096, 256), (65536, 256, 16, 1), (96, 1, 96, 96)])
@pytest.mark.parametrize("number", [False, True])
def test_elementwise_results_get_the_strides_of_real_ones(stride, number) -> None:
    shape = (1, 96, 1, 1) if stride[0] == 96 else (1, 256, 16, 16)
    source = torch.empty_strided(shape, stride)
    real = source / 2 if number else source.sigmoid()
    given = (source, 2) if number else (source,)
    assert pointwise_strides(given, real) == list(real.stride())


def test_a_tensor_that_the_model_replaces_goes() -> None:
    class Converting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(1, 3, 1, 1)

        def forward(self, x):
            self.mean = self.mean.type_as(x)
            return x - self.mean

    step = InferenceStep((images().bfloat16(),))
    assert trace_step(Converting(), step).peak_bytes == real_trace(Converting(), step).peak_bytes


@pytest.mark.parametrize("how", ["none", "full"])
def test_statistics_of_mixed_types_are_those_of_real_normalizations(how) -> None:
    def block() -> nn.Module:
        parts = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Sequential(nn.GroupNorm(2, 8))
        return nn.Sequential(*parts)

    model = nn.Sequential(nn.Sequential(block(), block()))
    step = TrainingStep((torch.rand(2, 8, 16, 16),), checkpointing=how, autocast=torch.bfloat16)
    assert trace_step(model, step).peak_bytes == real_trace(model, step).peak_bytes


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["group", "layer", "batch"])
def test_gradients_of_norms_have_the_types_of_real_ones(kind: str, affine: bool) -> None:
    norms: dict[str, nn.Module] = {
        "group": nn.GroupNorm(2, 8, affine=affine),
        "layer": nn.LayerNorm((8, 12, 16), elementwise_affine=affine),
        "batch": nn.BatchNorm2d(8, affine=affine),
    }

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 8, 1), norms[kind]

        def forward(self, x):
            return self.norm(self.first(x))

    step = TrainingStep((torch.rand(2, 3, 12, 16),), autocast=torch.bfloat16)
    fake, real = trace_step(Mixed(), step), real_trace(Mixed(), step)
    assert sorted(event.size for event in fake.events) == sorted(e.size for e in real.events)
    assert fake.peak_bytes == real.peak_bytes
