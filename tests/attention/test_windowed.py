"""Attention of windows that share a bias, a few of which are masked."""

import pytest
import torch

from lowtide.attention.window_attention import MaskPattern, attend_windows, patterns_in_range


def dense(query, key, value, bias, masks, scale):
    scores = query @ key.mT * scale + masks
    return (scores if bias is None else scores + bias).softmax(-1) @ value


@pytest.mark.grid(5)
@pytest.mark.parametrize("channels", [6, 16])
@pytest.mark.parametrize("others", [1, 3, 5])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_every_window_gets_its_own_mask(monkeypatch, channels, others, has_bias, elsewhere):
    if elsewhere:  # as on a GPU, by any available backend
        monkeypatch.setattr("lowtide.attention.window_attention._is_on_cpu", lambda _: False)
    torch.manual_seed(0)
    query = torch.randn(7, 2, 9, channels, dtype=torch.float64)
    key, value = torch.randn(2, 7, 2, 11, channels, dtype=torch.float64)
    bias = torch.randn(1, 2, 9, 11).double() if has_bias else None
    added = torch.randn(2, 1, 1, 9, 11).double()
    # In some order, and most of them in the end without any.
    groups = [tuple(range(others - 1)), (6,), tuple(range(others - 1, 6))]
    patterns = [
        MaskPattern(places, mask)
        for places, mask in zip(groups, (*added, None), strict=True)
        if places
    ]
    masks = torch.zeros(7, 1, 9, 11, dtype=torch.float64)
    masks[list(groups[0])], masks[6] = added[0], added[1]
    expected = dense(query, key, value, bias, masks, 0.3)
    found = attend_windows(query, key, value, bias, patterns, 0.3)
    torch.testing.assert_close(found, expected)
    for shape in ((1, 9, 11), (9, 11)):
        flat = [
            MaskPattern(one.windows, None if one.mask is None else one.mask.view(shape))
            for one in patterns
        ]
        given = None if bias is None else bias[0]
        torch.testing.assert_close(attend_windows(query, key, value, given, flat, 0.3), expected)


@pytest.mark.parametrize("channels", [6, 16])
def test_contiguous_windows_are_not_copied(monkeypatch, channels):
    def never(*_, **__):
        raise AssertionError("windows were gathered")

    torch.manual_seed(0)
    parts = torch.randn(7, 9, 3, 2, channels, dtype=torch.float64).permute(2, 0, 3, 1, 4)
    bias, added = torch.randn(1, 2, 9, 9).double(), torch.randn(2, 1, 1, 9, 9).double()
    patterns = [
        MaskPattern(range(6, 7), added[0]),
        MaskPattern(range(4), None),
        MaskPattern(range(4, 6), added[1]),
    ]
    masks = torch.zeros(7, 1, 9, 9, dtype=torch.float64)
    masks[6], masks[4:6] = added[0], added[1]
    expected = dense(*parts, bias, masks, 0.3)
    monkeypatch.setattr(torch.Tensor, "index_select", never)
    found = attend_windows(*parts, bias, patterns, 0.3)
    torch.testing.assert_close(found, expected)
    # Adjacent heads, so that merging them is no copy.
    assert found.transpose(1, 2).is_contiguous()
    monkeypatch.undo()
    one = attend_windows(*parts, bias, [MaskPattern(range(7), None)], 0.3)
    torch.testing.assert_close(one, dense(*parts, bias, 0 * masks, 0.3))


@pytest.mark.parametrize("channels", [6, 16])
def test_without_masks(channels):
    query, key, value = torch.randn(3, 5, 2, 9, channels, dtype=torch.float64)
    found = attend_windows(query, key, value, None, (), 0.5)
    torch.testing.assert_close(found, (query @ key.mT * 0.5).softmax(-1) @ value)


def test_scores_that_are_written_out_are_few_at_once(monkeypatch):
    monkeypatch.setattr("lowtide.attention.window_attention._SCORE_BYTES", 2 * 9 * 9 * 8)
    query, key, value = torch.randn(3, 5, 2, 9, 6, dtype=torch.float64)
    found = attend_windows(query, key, value, None, (), 0.5)
    torch.testing.assert_close(found, (query @ key.mT * 0.5).softmax(-1) @ value)


def test_patterns_of_some_windows_are_counted_from_the_first_of_them():
    patterns = [
        MaskPattern(range(5), None),
        MaskPattern([9, 6, 5], None),
        MaskPattern([7, 8], None),
    ]
    assert [list(one.windows) for one in patterns_in_range(patterns, 4, 7)] == [[0], [2, 1]]
    assert patterns_in_range(patterns, 4, 7)[0].windows == range(
        1
    )  # which need not be copied together
    assert patterns_in_range(patterns, 10, 12) == []
