"""GroupNorm of channels-last images is as accurate as that of fp64."""

import pytest
import torch

from lowtide.models.denoiser.slim_unet import AccurateGroupNorm


@pytest.mark.parametrize("shape", [(1, 8, 301, 257), (2, 12, 5, 3), (1, 8, 1, 3), (3, 8, 700, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_equals_fp64_on_odd_sizes(shape, affine):
    torch.manual_seed(0)
    norm = AccurateGroupNorm(4, shape[1], affine=affine)
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter)
    image = (torch.randn(shape) + 2).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        found = norm(image)
        right = norm.double()(image.double())
    assert (found - right).abs().max() < 2e-6
    assert found.dtype == torch.float32


def test_is_more_accurate_than_the_operator_that_it_replaces():
    image = (torch.randn(1, 4, 512, 768) + 2).contiguous(memory_format=torch.channels_last)
    right = torch.nn.functional.group_norm(image.double(), 2)
    with torch.no_grad():
        found = AccurateGroupNorm(2, 4)(image)
    torchs = torch.nn.functional.group_norm(image, 2)
    assert (found - right).abs().max() < 2e-6 < (torchs - right).abs().max()
