"""What the modules hold beyond input and result, by the allocator's events, beside what they
replace."""

import pytest
import torch

# The benchmarks are scripts, not a package.
from attention_baselines import SeedHierarchical
from attention_modules import workspace_bytes

from lowtide.attention.spatial import (
    ChannelAttention,
    LinearAttention,
    LocalWindowAttention,
    TransposedAttention,
)

CHANNELS = 64
# Scores of all pairs of 128² pixels in fp32, for one head: a softmax over them holds more.
ALL_SCORES = 4 * (128 * 128) ** 2


def workspace(module, height, width):
    with torch.inference_mode():
        return workspace_bytes(module.eval(), torch.randn(1, CHANNELS, height, width))


def test_local_windows_hold_a_seventh_of_the_seeds_chunks():
    chunks = workspace(SeedHierarchical(CHANNELS), 128, 128)
    assert workspace(LocalWindowAttention(CHANNELS), 128, 128) <= 0.15 * chunks


@pytest.mark.slow
def test_local_windows_hold_a_seventh_of_the_seeds_chunks_of_larger_images():
    chunks = workspace(SeedHierarchical(CHANNELS, most_chunked=1 << 30), 256, 256)
    assert workspace(LocalWindowAttention(CHANNELS), 256, 256) <= 0.15 * chunks


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (LocalWindowAttention, 0.02),
        (LinearAttention, 0.02),
        (TransposedAttention, 0.03),
        (ChannelAttention, 0.01),
    ],
)
def test_little_memory_compared_with_a_softmax_over_all_pairs(make, share):
    assert workspace(make(CHANNELS), 128, 128) <= share * ALL_SCORES


@pytest.mark.parametrize("form", ["halo", "blended"])
def test_a_row_of_windows_grows_with_the_width_alone(form):
    module = LocalWindowAttention(CHANNELS, form=form)
    by_height = [workspace(module, height, 96) for height in (96, 200)]
    assert len(set(by_height)) == 1
    assert workspace(module, 96, 300) <= 1.05 * 300 / 96 * by_height[0]


@pytest.mark.slow
def test_a_row_of_windows_grows_with_the_width_alone_up_to_2048():
    module = LocalWindowAttention(CHANNELS)
    taken = {side: workspace(module, side, side) for side in (256, 1024, 2048)}
    assert taken[1024] == workspace(module, 256, 1024)
    for side in (1024, 2048):
        assert taken[side] <= side / 256 * taken[256]
