"""Wan's video autoencoder in both orders of chunks and bands, next to diffusers' own calls."""

import pytest
import torch

from lowtide.integrations.video_autoencoders import wan
from lowtide.streaming.chunk_stream import ChunkStream

diffusers = pytest.importorskip("diffusers")

BOUND, ALL = 3e-5, 99


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLWan(base_dim=8, z_dim=16).eval()


def compare(part, clip, wanted, exact, **settings):
    """The stream's plan; its result is as near to the plain one as that is to fp64, times two."""
    stream = ChunkStream(part.first, part.later, frames=part.frames, **settings)
    error = (stream(clip) - wanted).abs().max()
    assert error <= min(BOUND, 2 * (wanted - exact).abs().max())
    return stream.plan(clip)


def in_fp64(vae, call, clip):
    vae.double()
    try:
        return call(clip.double())
    finally:
        vae.float()


@pytest.mark.parametrize(
    ("together", "pages"),
    [
        (ALL, "memory"),
        pytest.param(1, "disk", marks=pytest.mark.slow),
        pytest.param(2, "disk", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_decode(vae, together, pages):
    latents = torch.randn(1, 16, 3, 5, 7)

    def plain(given):
        return vae.decode(given).sample

    wanted, exact = plain(latents), in_fp64(vae, plain, latents)
    plan = compare(
        wan.decoder(vae), latents, wanted, exact, together=together, pages=pages, budget="21MiB"
    )
    assert ("all in each band" in plan.title) == (together == ALL)
