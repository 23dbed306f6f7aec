"""What only results need is computed where its last argument is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.streaming.chunk_stream import ChunkStream


class Kept(nn.Module):
    """Convolutions over frames, each with the last two of what it was given before.

    ``late`` cuts the frames to keep at the end, as modules do that ask their layers for them.
    """

    def __init__(self, late: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.late = late
        self.convolutions = nn.ModuleList(nn.Conv3d(8, 8, 3, padding=(0, 1, 1)) for _ in range(4))
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, chunk, *state):
        given, kept = [], []
        for number, convolution in enumerate(self.convolutions):
            before = state[number] if state else chunk[:, :, :1].repeat(1, 1, 2, 1, 1)
            chunk = torch.cat([before, chunk], 2)
            given.append(chunk)
            kept.append(chunk[:, :, -2:] * 1)
            frames = convolution(chunk).transpose(1, 2).flatten(0, 1)
            chunk = self.norm(frames)[None].transpose(1, 2).sigmoid()
        if self.late:
            kept = [one[:, :, -2:] * 1 for one in given]
        return chunk, *kept


@pytest.mark.parametrize("side", [(41, 37), (64, 64)])
def test_state_that_is_cut_at_the_end_takes_no_more_memory(side):
    clip = torch.randn(1, 8, 9, *side, generator=torch.Generator().manual_seed(1))
    streams = [
        ChunkStream(module, module, frames=(1, 4), budget="1GiB", together=1)
        for module in (Kept(late=False).eval(), Kept(late=True).eval())
    ]
    with torch.no_grad():
        early, late = (one(clip) for one in streams)
        assert torch.equal(early, late)
        early_bytes, late_bytes = (one.plan(clip).peak_bytes for one in streams)
    assert late_bytes == early_bytes
