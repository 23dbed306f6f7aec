"""Multiply-adds are those that PyTorch's own counter finds; seconds follow them and the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.prediction.operator_costs import multiply_adds, roofline_seconds
from lowtide.memory.profiles import load_profile
from lowtide.memory.profiles.simulated_device import simulate_attention
from lowtide.memory.tracing.fake import FakeModelConverter
from lowtide.memory.tracing.steps import InferenceStep, NullStepObserver, TrainingStep


class Mixed(nn.Module):
    """Every kind of operator that is counted, in blocks that can be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose2d(3, 16, 4, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(16, 16, 3, padding=2, dilation=2),
                    nn.SiLU(),
                    nn.Flatten(2),
                    nn.Linear(256, 256),
                )
                for _ in range(2)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).view(x.shape)
            q = x.flatten(2)[:, None]
            x = x + F.scaled_dot_product_attention(q, q, q)[:, 0].view(x.shape)
        return torch.bmm(x.flatten(2), x.flatten(2).transpose(1, 2))


def counted(model: nn.Module, step: TrainingStep, device: str) -> int:
    faker = FakeModelConverter()
    twin, fake = faker.model(model), faker.step(step)
    with faker.fake_mode(), simulate_attention(load_profile(device)):
        run = fake.prepare(twin)
        with FlopCounterMode(display=False) as counter:
            run(NullStepObserver())
    return counter.get_total_flops() // 2


@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch 2.11 counts less on the CPU")
@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("device", ["cpu", "rtx3060-12gb"])
def test_counts_are_those_of_pytorchs_counter(how: Any, device: str) -> None:
    step = TrainingStep((torch.empty(2, 3, 8, 8, device="meta"),), checkpointing=how)
    trace = trace_step(Mixed(), step, profile=load_profile(device))
    assert multiply_adds(trace) == counted(Mixed(), step, device)


def test_grouped_and_strided_convolutions() -> None:
    # PyTorch's counter takes grouped convolutions backward to be dense ones, so this is by hand:
    # 7 × 9 pixels of 8 channels, each from 2 channels and 3 × 3 weights; once forward, and
    # backward for the weights alone, as images need no gradient.
    model = nn.Conv2d(8, 8, 3, groups=4, stride=2, dilation=2)
    trace = trace_step(model, TrainingStep((torch.empty(2, 8, 18, 22, device="meta"),)))
    assert multiply_adds(trace) == 2 * (2 * 7 * 9 * 8 * 2 * 9)
    assert multiply_adds(trace, ("forward",)) == 2 * 7 * 9 * 8 * 2 * 9
    assert multiply_adds(trace, ("optimizer",)) == 0


def test_a_backward_pass_takes_more_and_a_faster_gpu_less_time() -> None:
    model, inputs = Mixed(), (torch.rand(512, 3, 8, 8),)
    forward = trace_step(model, InferenceStep(inputs))
    step = trace_step(model, TrainingStep(inputs))
    small, large = load_profile("rtx3060"), load_profile("h200")
    assert roofline_seconds(step, small) > 2 * roofline_seconds(forward, small)
    assert roofline_seconds(step, large) < roofline_seconds(step, small)
