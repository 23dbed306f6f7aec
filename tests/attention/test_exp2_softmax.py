"""Softmax by powers of two: scores of any size, whatever else is computed with them."""

from functools import partial

import pytest
import torch

from lowtide.attention.cpu_ops import LOG2_E, exp2_softmax_matmul, supports_exp2_softmax
from lowtide.attention.window_attention import attend_windows


def softened(scores, values):
    """`exp2_softmax_matmul` of scores, and how often it asked for them."""
    calls = []

    def again():
        calls.append(1)
        return scores * LOG2_E

    out = scores.new_empty(*scores.shape[:-1], values.shape[-1])
    exp2_softmax_matmul(again, partial(torch.matmul, other=values), out)
    return out, len(calls)


@pytest.mark.grid(7)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (2, 3, 33, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1.0, 8.0, 30.0, 1000.0])
@pytest.mark.parametrize("shift", [0.0, -300.0, 300.0])
def test_scores_of_any_size(shape, dtype, size, shift):
    torch.manual_seed(0)
    scores = torch.randn(shape, dtype=dtype) * size + shift
    values = torch.randn(*shape[:-2], shape[-1], 4, dtype=dtype)
    found, times = softened(scores, values)
    wanted = scores.double().softmax(-1) @ values.double()
    # Scores are rounded before they are powers of two: an error of theirs is one of the result.
    bound = 4 * torch.finfo(dtype).eps * (1 + scores.abs().max())
    assert (found.double() - wanted).abs().max() <= bound * values.abs().max()
    assert times == 1 if shift == 0 and size < 8 else times <= 2
    assert times == 2 or shift == 0


def test_a_query_does_not_depend_on_others():
    torch.manual_seed(0)
    scores, values = torch.randn(40, 50), torch.randn(50, 8)
    usual, _ = softened(scores, values)
    scores[[3, 17]] *= 1e4
    scores[20] = torch.nan
    scores[21] = -torch.inf  # no key is seen
    found, times = softened(scores, values)
    assert times == 2
    others = [row for row in range(40) if row not in (3, 17, 20, 21)]
    assert torch.equal(found[others], usual[others])
    torch.testing.assert_close(found[[3, 17]], values[scores[[3, 17]].argmax(-1)])
    assert found[[20, 21]].isnan().all()


@pytest.mark.parametrize("size", [1.0, 20.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_windows_with_narrow_heads(size, with_bias):
    torch.manual_seed(0)
    query, key, value = (torch.randn(5, 2, 9, 8) * size for _ in range(3))
    bias = torch.randn(1, 2, 9, 9) if with_bias else None
    found = attend_windows(query, key, value, bias, [], 0.3)
    scores = 0.3 * query.double() @ key.double().mT + (0 if bias is None else bias.double())
    wanted = scores.softmax(-1) @ value.double()
    assert (found.double() - wanted).abs().max() <= 1e-6 * (1 + scores.abs().max()) * size


def test_gradients_and_short_types_are_left_to_a_softmax():
    plain = torch.ones(2)
    assert supports_exp2_softmax(plain)
    assert not supports_exp2_softmax(plain, plain.half())
    assert not supports_exp2_softmax(plain.clone().requires_grad_())
    query, key, value = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    attend_windows(query, key, value, None, [], 1.0).sum().backward()
    assert query.grad is not None
