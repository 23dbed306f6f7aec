"""Models over clips, series and volumes, streamed along each axis within a small budget."""

from collections import deque

import pytest
import torch

import lowtide
from lowtide.memory.live_peak import live_peak_bytes
from support.axis_models import SeriesModel, VideoDecoder, VideoEncoder, VolumeUNet

MODELS = {
    "decoder": (VideoDecoder, (1, 4, 5, 19, 15)),
    "encoder": (VideoEncoder, (1, 3, 13, 37, 29)),
    "series": (SeriesModel, (1, 3, 40013)),
    "volume": (VolumeUNet, (1, 2, 37, 29, 27)),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("series", 2),
        ("volume", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("decoder", 2),
                ("decoder", 3),
                ("decoder", 4),
                ("encoder", 2),
                ("encoder", 4),
            )
        ),
        *(pytest.param("volume", axis, marks=pytest.mark.slow) for axis in (3, 4)),
    ],
)
def test_each_axis_gives_the_same_in_less_memory(name, axis):
    make, shape = MODELS[name]
    torch.manual_seed(1)
    model, x = make().eval(), torch.rand(shape)
    small, expected = lowtide.stream(model, budget="26MiB", axis=axis), model(x)
    assert (small(x) - expected).abs().max() <= 2e-6 * expected.abs().max()
    whole = live_peak_bytes(lambda: model(x))
    taken = live_peak_bytes(lambda: small(x))
    assert taken <= 0.9 * whole


def run_by_frames(model, clip):
    """Check the frames of a streamed clip, and return the bytes that the run holds at its peak."""
    small = lowtide.stream(model, budget="20.5MiB", axis=2, pages="memory")
    frames = [rows.clone() for _, rows in small.rows(clip)]
    expected = model(clip)
    assert len(frames) == expected.shape[2]
    assert (torch.cat(frames, 2) - expected).abs().max() <= 2e-6 * expected.abs().max()
    return live_peak_bytes(lambda: deque(small.rows(clip), 0))


def test_a_causal_decoder_runs_by_frames_in_memory_that_does_not_grow():
    model, clip = VideoDecoder().eval(), torch.rand(1, 4, 7, 13, 11)
    assert run_by_frames(model, clip) <= run_by_frames(model, clip[:, :, :3])
