"""Weights paged by diffusers' group offloading, activations in bands by `fit`."""

import sys

import pytest
import torch
from diffusers import FluxPipeline

import lowtide
from lowtide import UsageError
from lowtide.core.heap import set_heap_mode, tune_heap
from lowtide.core.units import MIB
from lowtide.memory.meter import HostMemoryMeter
from support.tiny_pipelines import NO_TEXT, flux, images, kl, text_to_image

BUDGET = 88 * MIB


def page(module, **changes):
    """Keep all blocks but one where ``changes`` say: in memory or, by a path, on disk."""
    settings = {"offload_type": "block_level", "num_blocks_per_group": 1, **changes}
    module.enable_group_offload(torch.device("cpu"), **settings)


@pytest.mark.grid(3)
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
@pytest.mark.parametrize("fitted_first", [True, False])
@pytest.mark.parametrize("made", [text_to_image, flux])
def test_a_paged_pipeline_makes_the_same_images(made, fitted_first, level, tmp_path):
    pipe, call = made()
    wanted = images(pipe, call)
    if fitted_first:
        lowtide.fit(pipe.vae, budget="64MiB", pages="memory")
    page(pipe, offload_type=level, offload_to_disk_path=str(tmp_path), exclude_modules="vae")
    if not fitted_first:
        lowtide.fit(pipe.vae, budget="64MiB", pages="memory")
    for _ in range(2):
        assert (images(pipe, call) - wanted).abs().max() <= 2e-5
    lowtide.unfit(pipe.vae)
    assert (images(pipe, call) - wanted).abs().max() <= 2e-5


def test_a_paged_autoencoder_is_refused_with_what_to_do():
    pipe, call = text_to_image()
    wanted = images(pipe, call)
    page(pipe)
    with pytest.raises(UsageError, match="group_offloading") as caught:
        lowtide.fit(pipe.vae)
    assert "group offloading of the other modules" in caught.value.hint
    assert torch.equal(images(pipe, call), wanted)


def large_vae():
    """Eight pixels to a latent's side, and much to keep for each pixel."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4}
    blocks |= {"up_block_types": ("UpDecoderBlock2D",) * 4}
    return kl(block_out_channels=(32,) * 4, shift_factor=0.1, **blocks)


def run_within_budget(folder, call):
    """The images of the pipeline in ``folder`` / "pipeline", with weights and bands paged."""
    pipe = FluxPipeline.from_pretrained(folder / "pipeline", **NO_TEXT)
    page(pipe.transformer, offload_to_disk_path=str(folder / "transformer"))
    lowtide.fit(pipe.vae, budget="32MiB")
    return images(pipe, call)


def metered(call):
    """The result of a call, and what memory it took beside what was there before."""
    meter = HostMemoryMeter()
    meter.start()
    result = call()
    usage = meter.lap()
    meter.stop()
    return result, usage


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux says")
@pytest.mark.own_process
def test_weights_and_activations_beyond_the_budget(tmp_path):
    """Each alone is more than the budget of both; weights count while their files are mapped."""
    assert tune_heap()
    set_heap_mode("trim")
    pipe, call = flux()
    pipe.save_pretrained(tmp_path / "small" / "pipeline")
    run_within_budget(tmp_path / "small", call)  # libraries are loaded
    pipe, call = flux(
        large_vae(),
        num_single_layers=26,
        num_attention_heads=4,
        attention_head_dim=64,
        axes_dims_rope=(16, 24, 24),
    )
    call |= {"height": 384, "width": 480}
    assert sum(weight.nbytes for weight in pipe.transformer.parameters()) > BUDGET
    pipe.save_pretrained(tmp_path / "pipeline", max_shard_size="16MB")
    wanted, activations = metered(lambda: images(pipe, call))
    assert activations.corrected_peak_bytes > BUDGET
    found, all_of_it = metered(lambda: run_within_budget(tmp_path, call))
    assert all_of_it.high_water_bytes <= BUDGET
    assert (found - wanted).abs().max() <= 2e-5
