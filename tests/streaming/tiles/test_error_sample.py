"""The stated error of tiles holds for the whole image."""

import dataclasses
import math
import tracemalloc

import numpy as np
import pytest
import torch

from lowtide.core.metrics import psnr
from lowtide.streaming.tiles.error_sample import execution_error, precision_error
from support.toy_models import (
    ArraySource,
    Centered,
    conv_net,
    image_adapter,
    make_plan,
    network,
    run_array,
)

RNG = np.random.default_rng(2)


def uneven(height, width):
    ramp = np.linspace(0.2, 0.8, height * width, dtype=np.float32).reshape(height, width, 1)
    return (ramp + 0.05 * RNG.random((height, width, 3), np.float32)).astype(np.float32)


def error_of(net, array, plan, allowed_pixels):
    adapter, source = image_adapter(net, array), ArraySource(array)
    return execution_error(net, adapter, source, plan.image, plan.strategy, allowed_pixels)


@pytest.mark.parametrize("blend", [True, False])
def test_with_all_tiles_sampled_the_error_is_the_error(blend):
    array, net = uneven(90, 90), network(Centered(), scale=1)
    plan = make_plan(array, None, scale=1, tile=48, overlap=8, hann_blend=blend)
    stated = error_of(net, array, plan, 10**9)
    assert stated.against == "the whole image"
    assert stated.tiles_sampled == stated.tiles_total == plan.strategy.tiles
    tiled, _ = run_array(net, array, plan)
    whole, _ = run_array(net, array, make_plan(array, None, scale=1, strategy="whole"))
    actual = psnr(tiled, whole)
    assert stated.psnr_db <= actual + 1e-3
    assert stated.psnr_db == pytest.approx(actual, abs=0.01 if not blend else 3)
    assert np.abs(tiled - whole).max() <= stated.max_error + 1e-6


def test_a_sample_states_a_lower_bound():
    array, net = uneven(400, 420), network(Centered(), scale=1)
    plan = make_plan(array, None, scale=1, tile=64)
    stated = error_of(net, array, plan, 10**9)
    assert stated.tiles_sampled < stated.tiles_total
    whole, _ = run_array(net, array, make_plan(array, None, scale=1, strategy="whole"))
    tiled, _ = run_array(net, array, plan)
    assert stated.psnr_db <= psnr(tiled, whole)


def test_without_memory_for_the_whole_it_names_its_reference():
    array, net = uneven(200, 200), network(Centered(), scale=1)
    plan = make_plan(array, None, scale=1, tile=64)
    stated = error_of(net, array, plan, 80 * 80)
    assert stated.against == "tiles with 8 px more context on each side"
    assert math.isfinite(stated.psnr_db)
    assert stated.max_error > 0


def test_references_of_other_samples_are_let_go():
    """With results sixteen times as large as the input, one more would show."""
    array, held = RNG.integers(0, 256, (200, 200, 3), np.uint8), []

    class Watched(torch.nn.Module):
        def forward(self, images):
            if images.shape[2] > 64:  # of a reference, not of the tile
                held.append(tracemalloc.get_traced_memory()[0])
            return images.repeat_interleave(4, 2).repeat_interleave(4, 3)

    net, plan = network(Watched(), scale=4), make_plan(array, None, scale=4, tile=64)
    tracemalloc.start()
    found = error_of(net, array, plan, 80 * 80)
    tracemalloc.stop()
    assert len(held) == found.tiles_sampled > 1
    assert max(held) < 64 * 64 * 16 * 3 * 4


def test_low_precision_is_measured_against_fp32():
    array = RNG.integers(0, 256, (100, 100, 3), np.uint8)
    exact = conv_net()
    body = conv_net().to(torch.bfloat16)

    class Low(torch.nn.Module):
        def forward(self, images):
            return body(images.bfloat16()).float()

    low = network(Low(), precision="bf16", make_fp32_forward=lambda: exact)
    plan = make_plan(array, 4, tile=64)
    adapter, source = image_adapter(low, array), ArraySource(array)
    stated = precision_error(low, adapter, source, plan.image, 64 * 64)
    assert stated.against == "fp32"
    assert 30 < stated.psnr_db < 90
    twin = dataclasses.replace(low, forward=exact, precision="fp32")
    a, _ = run_array(low, array.astype(np.float32) / 255, make_plan(array.astype(np.float32), 4))
    b, _ = run_array(twin, array.astype(np.float32) / 255, make_plan(array.astype(np.float32), 4))
    assert stated.psnr_db == pytest.approx(psnr(a, b), abs=1.5)


@pytest.mark.parametrize(
    ("align", "minimum", "square"), [(1, 0, False), (4, 24, False), (8, 0, True)]
)
def test_low_precision_is_measured_on_parts_that_fit(align, minimum, square):
    """Whatever the plan runs at once: a streamed one has a single tile, the image."""
    array, seen = RNG.integers(0, 256, (96, 96, 3), np.uint8), []

    class Watched(torch.nn.Module):
        def forward(self, images):
            seen.append(images.shape[2] * images.shape[3])
            return images.repeat_interleave(2, 2).repeat_interleave(2, 3)

    low = network(Watched(), precision="bf16", make_fp32_forward=Watched)
    image = make_plan(array, 4).image.model_copy(
        update={"align": align, "minimum": minimum, "square": square}
    )
    adapter, source = image_adapter(low, array), ArraySource(array)
    stated = precision_error(low, adapter, source, image, 20 * 50)
    assert math.isinf(stated.psnr_db)
    assert stated.tiles_sampled == 3 < stated.tiles_total
    (pixels,) = set(seen)
    assert (0.5 if square else 0.7) * 20 * 50 <= pixels <= 20 * 50
