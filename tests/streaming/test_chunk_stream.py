"""Clips in chunks of frames and bands of rows, with the state of causal convolutions."""

import pytest
import torch

from lowtide.core.errors import BudgetError, UsageError
from lowtide.streaming.chunk_stream import ChunkStream
from support.causal_modules import causal_modules, whole_clip


@torch.no_grad()
def test_chunks_are_those_of_the_whole_clip_within_the_budget():
    first, later = causal_modules()
    clip = torch.rand(2, 3, 4, 161, 120)
    wanted = whole_clip(later, clip)
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
    first, later = causal_modules()
    clip = torch.rand(1, 3, 3, 81, 60)
    with pytest.raises(BudgetError) as refusal:
        ChunkStream(first, later, budget="1MiB")(clip)
    found = ChunkStream(first, later, budget=refusal.value.smallest)(clip)
    assert (found - whole_clip(later, clip)).abs().max() <= 3e-6


@torch.no_grad()
def test_one_frame_and_bad_clips():
    first, later = causal_modules()
    stream = ChunkStream(first, later, budget="1GiB")
    clip = torch.rand(1, 3, 1, 17, 12)
    assert (stream(clip) - whole_clip(later, clip)).abs().max() <= 3e-6
    for bad in (clip[0], clip[:, :, :0], clip.long()):
        with pytest.raises(UsageError, match="a clip is"):
            stream(bad)
