"""Clips in chunks of frames and bands of rows, with the state of causal convolutions."""

import pytest
import torch
from torch import nn

from lowtide.core.errors import BudgetError, UsageError
from lowtide.streaming.chunk_stream import ChunkStream

CHANNELS = 16


class Later(nn.Module):
    """Two causal convolutions and an upsampling; both caches are state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv3d(3, CHANNELS, 3, padding=(0, 1, 1))
        self.second = nn.Conv3d(CHANNELS, 3, 3, padding=(0, 1, 1))

    def forward(self, chunk, one, two):
        seen = torch.cat([one, chunk], 2)
        inside = self.first(seen).repeat_interleave(2, 3).repeat_interleave(2, 4).relu()
        seen_inside = torch.cat([two, inside], 2)
        return self.second(seen_inside), seen[:, :, -2:], seen_inside[:, :, -2:]


class First(nn.Module):
    """The same before any frame: all that was seen is zero."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def forward(self, chunk):
        _, _, _, height, width = chunk.shape
        one = chunk.new_zeros(1, 3, 2, height, width)
        return self.later(chunk, one, chunk.new_zeros(1, CHANNELS, 2, 2 * height, 2 * width))


def modules():
    later = Later().eval()
    return First(later).eval(), later


def whole(later, clip):
    """All frames at once: causal padding is the state of the first frame."""
    pad = (0, 0, 0, 0, 2, 0)
    inside = later.first(nn.functional.pad(clip, pad))
    inside = inside.repeat_interleave(2, 3).repeat_interleave(2, 4).relu()
    return later.second(nn.functional.pad(inside, pad))


@torch.no_grad()
def test_chunks_are_those_of_the_whole_clip_within_the_budget():
    first, later = modules()
    clip = torch.rand(2, 3, 4, 161, 120)
    wanted = whole(later, clip)
    stream = ChunkStream(first, later, budget="43MiB")  # where whole chunks need more
    found = stream(clip)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 3e-6
    assert "bands: up to 1," not in stream.explain(clip)
    # a change of the weights is seen, of another clip of this size too
    later.second.bias.add_(1)
    assert (stream(clip) - wanted - 1).abs().max() <= 3e-6


@pytest.mark.slow
@torch.no_grad()
def test_the_budget_that_a_refusal_names_is_enough():
    first, later = modules()
    clip = torch.rand(1, 3, 3, 81, 60)
    with pytest.raises(BudgetError) as refusal:
        ChunkStream(first, later, budget="1MiB")(clip)
    found = ChunkStream(first, later, budget=refusal.value.smallest)(clip)
    assert (found - whole(later, clip)).abs().max() <= 3e-6


@torch.no_grad()
def test_one_frame_and_bad_clips():
    first, later = modules()
    stream = ChunkStream(first, later, budget="1GiB")
    clip = torch.rand(1, 3, 1, 17, 12)
    assert (stream(clip) - whole(later, clip)).abs().max() <= 3e-6
    for bad in (clip[0], clip[:, :, :0], clip.long()):
        with pytest.raises(UsageError, match="a clip is"):
            stream(bad)
