"""Pipelines of diffusers make the same images with fitted autoencoders."""

import pytest
import torch

import lowtide
from support import tiny_pipelines
from support.tiny_pipelines import images

# diffusers warns of what its own pipelines call, and makes arrays as NumPy 2 no longer likes it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    "made",
    [
        *tiny_pipelines.QUICK,
        *(pytest.param(made, marks=pytest.mark.slow) for made in tiny_pipelines.MORE),
    ],
    ids=lambda made: made.__name__,
)
def test_a_pipeline_makes_the_same_images(made):
    pipe, call = made()
    wanted = images(pipe, call)
    assert wanted.std() > 0.05
    lowtide.fit(pipe.vae, budget="64MiB", pages="memory")
    for _ in range(2):
        assert (images(pipe, call) - wanted).abs().max() <= 2e-5
    lowtide.unfit(pipe.vae)
    assert torch.equal(images(pipe, call), wanted)
