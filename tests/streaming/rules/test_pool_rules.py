"""Separable max pooling, compared with PyTorch's own."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lowtide.streaming.rules.resample import max_pool
from support.band_runs import Branches, check_parity

SIZES = [(2, 2), (3, 3), (4, 5), (5, 1), (1, 7), (9, 8), (13, 13)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_max_pooling_bit_for_bit(dtype):
    torch.manual_seed(0)
    image = torch.randn(2, 3, 17, 23).to(dtype) - 2
    for size, shares in itertools.product(SIZES, ((0, 0), (1, 1), (0, 1), (1, 0))):
        pad = tuple(share * (extent // 2) for share, extent in zip(shares, size, strict=True))
        expected = F.max_pool2d(image, size, 1, pad)
        assert torch.equal(max_pool(image, size, pad), expected)
        mixed = image.contiguous(memory_format=torch.channels_last)
        assert torch.equal(max_pool(mixed, size, pad), expected)


def test_nan_spreads_and_infinity_stays():
    image = torch.zeros(1, 1, 9, 9)
    image[..., 4, 4], image[..., 0, 0], image[..., 8, 7] = torch.nan, -torch.inf, torch.inf
    found, expected = max_pool(image, (3, 3), (1, 1)), F.max_pool2d(image, 3, 1, 1)
    assert torch.equal(found.isnan(), expected.isnan())
    assert found.isnan().sum() == 9
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


def test_by_bands():
    kinds = [(3, 1, 1), (5, 1, 2), (2, 1), ((1, 3), 1, (0, 1)), (3, 2, 1), (2, 2)]
    pooled = {str(how): lambda x, how=how: F.max_pool2d(x - 3, *how) for how in kinds}
    check_parity(Branches(pooled).double(), torch.rand(1, 3, 21, 13, dtype=torch.float64))
