"""Clips in chunks of frames and bands of rows, with the state of causal convolutions."""

import io

import pytest
import torch

from lowtide import BudgetError, UsageError
from lowtide.streaming.chunk_stream import ChunkStream
from lowtide.streaming.clip_plan import RunPart
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
@pytest.mark.parametrize("together", [1, 3])
def test_a_clip_that_is_never_held_whole(together):
    first, later = causal_modules()
    clip = torch.rand(1, 3, 8, 33, 20)
    stream = ChunkStream(first, later, frames=(1, 2), budget="1GiB", together=together)
    left, asked, made = list(clip.unbind(2)), [], []

    def read(frames):
        asked.append(frames)
        return torch.stack([left.pop(0) for _ in range(frames)], 2)

    like = torch.empty(1).expand(clip.shape)
    stream.run_chunks(like, read, made.append)
    assert asked == [2, 2, 2, 2] and [one.shape[2] for one in made] == asked
    assert (torch.cat(made, 2) - whole_clip(later, clip)).abs().max() <= 3e-6
    # the plan counts results in flight, not those of a longer clip
    longer = torch.empty(1).expand(1, 3, 80, 33, 20)
    plans = [stream.plan(one, keep_result=False) for one in (like, longer)]
    if together == 1:
        assert plans[0].peak_bytes == plans[1].peak_bytes < stream.plan(longer).peak_bytes
    with pytest.raises(UsageError, match="not a batch of 2"):
        stream.run_chunks(like.expand(2, -1, -1, -1, -1), read, made.append)


@torch.no_grad()
def test_one_frame_and_bad_clips():
    first, later = causal_modules()
    stream = ChunkStream(first, later, budget="1GiB")
    clip = torch.rand(1, 3, 1, 17, 12)
    assert (stream(clip) - whole_clip(later, clip)).abs().max() <= 3e-6
    for bad in (clip[0], clip[:, :, :0], clip.long()):
        with pytest.raises(UsageError, match="a clip is"):
            stream(bad)


@pytest.mark.parametrize("pages", ["memory", "disk"])
@torch.no_grad()
def test_a_run_goes_on_behind_the_state_that_was_saved(pages):
    """Its results are those of an undisturbed run, bit by bit."""
    first, later = causal_modules()
    clip, file = torch.rand(1, 3, 6, 31, 20), io.BytesIO()
    stream = ChunkStream(first, later, budget="64MiB", pages=pages, together=2)
    undisturbed, made = list[torch.Tensor](), list[torch.Tensor]()

    def run(write, part=None, begin=0):
        frames = iter(clip[:, :, begin:].split(1, 2))
        stream.run_chunks(clip, lambda count: next(frames), write, part)

    def save(done, state):
        if done == 2:
            state.save(file)

    run(undisturbed.append)
    run(made.append, RunPart(last=2, after_run=save))
    file.seek(0)
    run(made.append, RunPart(2, state=file), begin=4)
    assert torch.equal(torch.cat(made, 2), torch.cat(undisturbed, 2))
