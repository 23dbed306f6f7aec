"""Copies of tensors into the order of their dimensions."""

import pytest
import torch

from lowtide.attention.cpu_ops import to_contiguous

MADE = {
    "tokens": lambda: torch.randn(1, 7, 45).transpose(1, 2),
    "two images of tokens": lambda: torch.randn(2, 7, 45).transpose(1, 2),
    "image": lambda: torch.randn(1, 9, 5, 7).permute(0, 3, 1, 2),
    "two images": lambda: torch.randn(2, 9, 5, 7).permute(0, 3, 1, 2),
    "rows of an image": lambda: torch.randn(1, 9, 5, 7).permute(0, 3, 1, 2)[:, :, 2:6],
    "columns of an image": lambda: torch.randn(1, 9, 5, 7).permute(0, 3, 1, 2)[..., 2:4],
    "repeated": lambda: torch.randn(1, 1, 5).expand(2, 4, 5),
    "matrix": lambda: torch.randn(6, 4).t(),
    "windows": lambda: torch.randn(1, 2, 4, 3, 4, 5).permute(0, 1, 3, 2, 4, 5),
    "empty": lambda: torch.randn(0, 4, 5).transpose(1, 2),
    "number": lambda: torch.randn(()),
    "half": lambda: torch.randn(1, 7, 45).transpose(1, 2).to(torch.bfloat16),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", MADE)
def test_numbers_stay_and_lie_in_order(name):
    given = MADE[name]()
    found = to_contiguous(given)
    assert found.is_contiguous()
    assert found.shape == given.shape and found.dtype == given.dtype
    assert torch.equal(found, given)


def test_contiguous_tensors_are_not_copied():
    given = torch.randn(1, 4, 5)
    assert to_contiguous(given) is given
