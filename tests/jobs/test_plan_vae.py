"""Plans of video autoencoders for GPUs that are not here: nothing is computed."""

import pytest
import torch

from lowtide import BudgetError, UsageError
from lowtide.jobs.vae.plan import plan_vae
from lowtide.memory.profiles import load_profile
from lowtide.streaming.chunk_stream import ChunkStream
from support.causal_modules import causal_modules
from support.tiny_video_vae import tiny_video_vae

CARD = "rtx4060-8gb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vae")
    tiny_video_vae().save(path)
    return path


def plan(model, **changes):
    return plan_vae(model, **{"size": "320x192", "frames": 17, "device": CARD, **changes})


def test_a_small_model_fits_and_says_what_it_takes(folder):
    found = plan(folder, size=(316, 190), frames=15)
    assert (found.model, found.precision, found.device) == ("VideoVAE", "bf16", CARD)
    assert found.latents == (4, 5, 24, 40)
    assert [one.part for one in found.parts] == ["encoder", "decoder"]
    for part in found.parts:
        assert (part.refusal, part.chunks, part.state, part.host_bytes) == (None, 5, "memory", 0)
        least = found.context_bytes + found.weight_bytes + part.state_bytes
        assert least < part.peak_bytes < found.budget_bytes
        assert part.seconds_per_frame > 0
    assert "not verified" in str(found) and "peak" in str(found)
    found.require()


def test_the_budget_that_a_refusal_names_is_enough(folder):
    context = load_profile(CARD).context_bytes
    refused = plan(folder, budget=context + (17 << 20), part="decoder")
    assert "does not fit" in str(refused)
    with pytest.raises(BudgetError) as refusal:
        refused.require()
    found = plan(folder, budget=refusal.value.smallest, part="decoder").parts[0]
    assert found.refusal is None
    assert found.state != "memory" and found.host_bytes + found.disk_bytes >= 2 * found.state_bytes
    assert found.moved_bytes_per_frame > 0
    assert found.peak_bytes <= refusal.value.smallest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "320"}, "no size"),
        ({"size": "0x192"}, "no size"),
        ({"frames": 0}, "--frames 0 has to be at least 1"),
        ({"frames": 2**31}, "--frames 2147483648 has to be at most"),
        ({"frames": 2**31 - 1, "size": "16384x16384"}, "more pixels than"),
        ({"size": "1000000000x64"}, "sides are at most"),
        ({"size": f"64x{2**70}"}, "sides are at most"),
        ({"device": "cpu"}, "measure"),
        ({"device": "rtx9"}, "no device profile"),
        ({"precision": "int8"}, "--precision int8 is not one of"),
    ],
)
def test_bad_arguments(folder, changes, message):
    with pytest.raises(UsageError, match=message):
        plan(folder, **changes)


def test_a_stream_for_another_device_only_plans():
    stream = ChunkStream(*causal_modules(), profile=load_profile(CARD))
    clip = torch.empty(1, 3, 4, 33, 20, device="meta")
    with pytest.raises(UsageError, match="only a plan"):
        stream(clip)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["VideoVAE", "AutoencoderKLWan"])
def test_full_sizes_in_a_minute_without_weights(model):
    import time

    started = time.process_time()
    found = plan(model, size="1280x720", frames=81)
    assert time.process_time() - started < 90  # of both parts
    found.require()
    decoder = found.parts[1]
    pixel_bytes = decoder.state_bytes / (1280 * 720)
    assert pixel_bytes == pytest.approx({"VideoVAE": 8641, "AutoencoderKLWan": 4730}[model], 0.02)
