"""Seconds that follow the device and the work."""

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.prediction.operator_costs import roofline_seconds
from lowtide.memory.profiles import load_profile
from lowtide.memory.tracing.steps import InferenceStep, TrainingStep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1)
        self.line = nn.Linear(16, 48)

    def forward(self, x):
        x = self.up(F.silu(self.conv(x)))
        q, k, v = self.line(x.flatten(2).transpose(1, 2)).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v) @ self.line.weight.T


def test_a_backward_pass_takes_more_and_a_faster_gpu_less_time() -> None:
    model, inputs = Net(), (torch.rand(2, 3, 64, 64),)
    forward = trace_step(model, InferenceStep(inputs))
    step = trace_step(model, TrainingStep(inputs))
    small, large = load_profile("rtx3060"), load_profile("h200")
    assert roofline_seconds(step, small) > 2 * roofline_seconds(forward, small)
    assert roofline_seconds(step, large) < roofline_seconds(step, small)
