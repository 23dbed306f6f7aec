"""Convolutions of frames as 2D convolutions, against `F.conv3d`."""

import pytest
import torch
import torch.nn.functional as F

from lowtide.streaming.rules.conv import convolve_frames


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "frames"),
    [
        ((3, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 3),
        ((3, 3, 3), (1, 1, 1), (0, 0, 1), (1, 1, 1), 6),
        ((3, 1, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1), 5),
        ((1, 3, 5), (1, 2, 1), (0, 1, 0), (1, 1, 2), 2),
        ((2, 3, 3), (1, 1, 2), (1, 1, 1), (2, 2, 1), 4),
    ],
)
def test_results_are_those_of_conv3d(kernel, stride, padding, dilation, frames, dtype):
    generator = torch.Generator().manual_seed(3)
    clip = torch.randn(2, 5, frames, 11, 13, generator=generator, dtype=dtype)
    weight = torch.randn(7, 5, *kernel, generator=generator, dtype=dtype)
    for bias in (None, torch.randn(7, generator=generator, dtype=dtype)):
        for given in (clip, clip[..., ::2, :], clip.transpose(3, 4)):
            wanted = F.conv3d(given, weight, bias, stride, padding, dilation)
            found = convolve_frames(given, weight, bias, stride, padding, dilation)
            bound = 4 * torch.finfo(dtype).eps * weight[0].numel() ** 0.5
            assert found.shape == wanted.shape
            assert (found - wanted).abs().max() <= bound * wanted.abs().max()
