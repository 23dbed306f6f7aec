"""Biases of a window by what is written down for each pair of a query and a key."""

import itertools

import pytest
import torch

from lowtide.attention.spatial.position import FactorizedRelativePositionBias, RelativePositionBias

FARTHEST = 9
# Along an axis: the first key's distance from the first query, the queries, the keys.
SHAPES = ((-3, 6, 10), (0, 5, 8), (-3, 6, 9), (-4, 3, 7), (0, 1, 1))


def one_by_one(position, down, right):
    """(heads, queries, keys), the pixels of both column by column."""
    table = position.full_table()
    offsets, (asking, seen) = (down[0], right[0]), zip(down[1:], right[1:], strict=True)
    queries = itertools.product(*(range(side) for side in reversed(asking)))
    keys = list(itertools.product(*(range(side) for side in reversed(seen))))
    return torch.stack(
        [
            torch.stack(
                [
                    table[
                        :,
                        FARTHEST + offsets[0] + below - row,
                        FARTHEST + offsets[1] + across - column,
                    ]
                    for across, below in keys
                ],
                1,
            )
            for column, row in queries
        ],
        1,
    )


@pytest.mark.grid(7)
@pytest.mark.parametrize("kind", [RelativePositionBias, FactorizedRelativePositionBias])
@pytest.mark.parametrize("down", SHAPES)
@pytest.mark.parametrize("right", SHAPES)
def test_every_pair_has_the_number_of_its_distance(kind, down, right):
    torch.manual_seed(0)
    position = kind(2, FARTHEST)
    found = position.window_bias(down, right, torch.zeros(()))
    wanted = one_by_one(position, down, right)[None]
    assert torch.equal(found, wanted)
    assert found.is_contiguous()  # fused kernels want keys side by side
    share = torch.randn_like(found)
    gradients = [
        torch.autograd.grad((one * share).sum(), list(position.parameters()))
        for one in (found, wanted)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
