"""`torch.compile` round modules that are streamed."""

import torch
from torch import nn

import lowtide


def test_a_stream_is_left_as_it_is():
    first, second = (nn.Conv2d(3, 3, 3, padding=1).eval() for _ in range(2))
    image = torch.randn(1, 3, 20, 24)
    with torch.no_grad():
        wanted = second(first(image))
        whole = nn.Sequential(lowtide.stream(first, budget="64MiB"), second)
        both = nn.Sequential(first, second).eval()
        for module in (whole, lowtide.stream(both, budget="64MiB")):
            compiled = torch.compile(module.eval(), backend="eager")
            assert (compiled(image) - wanted).abs().max() <= 1e-6
