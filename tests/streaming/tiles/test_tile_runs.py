"""The runner against the plain model: every kind of image, odd sizes, tiles and batches."""

import dataclasses
import weakref

import numpy as np
import pytest
import torch

from lowtide import Cancelled, LowtideError
from support.toy_models import Centered, Strided, conv_net, make_plan, network, pictures, run_array

picture = pictures()


def reference(module, array):
    """The whole image through the module, in fp64, as samples."""
    peak = 1 if array.dtype == np.float32 else np.iinfo(array.dtype).max
    image = torch.from_numpy(array.astype(np.float64) / peak).permute(2, 0, 1)[None]
    result = module.double()(image).clamp(0, 1)[0].permute(1, 2, 0).numpy() * peak
    module.float()
    return result


SAMPLES = "uint8", "uint16", "float32"
SIZES = (1, 1), (5, 130), (97, 64), (131, 203)
WISHES = {
    "whole": dict(strategy="whole"),
    "tiled": dict(tile=32),
    "batched": dict(tile=48, batch=3),
    "blended": dict(tile=40, hann_blend=True),
}
# Each way with each type of sample, and with all but one of the sizes.
RUNS = [
    (sample, SIZES[(first + second) % 4], way)
    for first, way in enumerate(WISHES)
    for second, sample in enumerate(SAMPLES)
]


@pytest.mark.parametrize(("sample", "size", "way"), RUNS)
def test_equals_the_plain_model(sample, size, way):
    module, wishes = conv_net(), WISHES[way]
    array = picture(*size, 3, sample)
    plan = make_plan(array, 4, **wishes)
    assert plan.accuracy == "exact"
    result, outcome = run_array(network(module), array, plan)
    assert result.dtype == array.dtype
    assert outcome.tiles == plan.strategy.tiles
    # A value halfway between two samples goes either way by what fp32 rounds, here 2e-6 of 255.
    step = {"float32": 2e-6, "uint8": 0.50051, "uint16": 0.6}[sample]
    np.testing.assert_allclose(result.astype(np.float64), reference(module, array), atol=step)


def test_tile_order_and_size_do_not_change_exact_results():
    module, array = conv_net(), picture(150, 170, 3, "uint16")
    results = [
        run_array(network(module), array, make_plan(array, 4, tile=tile, batch=batch))[0]
        for tile, batch in ((32, 1), (33, 4), (75, 2), (170, 1))
    ]
    for result in results[1:]:
        assert np.abs(result.astype(int) - results[0]).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(3, 3), (16, 50), (61, 75), (130, 129)])
def test_models_on_a_grid_are_padded_as_the_whole(height, width):
    module, array = Strided(), picture(height, width, 3, "uint8")
    rows, columns = -height % 4, -width % 4
    whole, _ = run_array(
        network(module, scale=1), array, make_plan(array, 7, scale=1, align=4, strategy="whole")
    )
    padded = np.pad(array, ((0, rows), (0, columns), (0, 0)), "reflect") if height > 3 else None
    if padded is not None:
        wanted = np.rint(reference(module, padded))[:height, :width]
        assert np.abs(whole - wanted).max() <= 1
    tiled, _ = run_array(
        network(module, scale=1), array, make_plan(array, 7, scale=1, align=4, tile=32)
    )
    assert np.abs(tiled.astype(int) - whole).max() <= 1


def test_too_little_overlap_is_bounded_not_exact():
    array = picture(100, 100, 3, "uint8")
    assert make_plan(array, 12, tile=32, overlap=2).accuracy == "bounded"
    assert make_plan(array, 4, tile=32, overlap=8).accuracy == "exact"
    assert make_plan(array, None, tile=48).accuracy == "bounded"
    assert make_plan(array, None, strategy="whole").accuracy == "exact"


def test_blending_softens_the_seams_of_an_inexact_model():
    array = picture(128, 128, 3, "float32") * 0.1 + 0.3
    array[64:] += 0.3  # so that tiles see different means
    net = network(Centered(), scale=1)

    def seam_step(**wishes):
        plan = make_plan(array, None, scale=1, tile=64, overlap=32, **wishes)
        tiled, _ = run_array(net, array, plan)
        whole, _ = run_array(net, array, make_plan(array, None, scale=1, strategy="whole"))
        error = tiled.astype(float) - whole
        return np.abs(np.diff(error.mean((1, 2)))).max()

    assert seam_step(hann_blend=True) < 0.5 * seam_step(hann_blend=False)


@pytest.mark.parametrize(("bands", "channels"), [(1, 3), (2, 1), (3, 1), (4, 3)])
def test_every_kind_of_image_through_every_kind_of_network(bands, channels):
    array = picture(70, 50, bands, "uint8")
    array[..., -1] |= 128  # visible everywhere
    net = network(conv_net(channels=channels), channels=channels)
    whole, _ = run_array(net, array, make_plan(array, 4, channels=channels, strategy="whole"))
    assert whole.shape == (140, 100, bands)
    tiled, _ = run_array(net, array, make_plan(array, 4, channels=channels, tile=32))
    assert np.abs(whole.astype(int) - tiled).max() <= 1


def test_gray_goes_through_color_networks_as_equal_channels():
    module, array = conv_net(), picture(40, 40, 1, "uint8")
    result, _ = run_array(network(module), array, make_plan(array, 4))
    wanted = reference(module, array.repeat(3, 2)).clip(0, 255).mean(2, keepdims=True)
    np.testing.assert_allclose(result, wanted, atol=0.51)


def test_cancel_stops_between_batches():
    array = picture(100, 100, 3, "uint8")
    calls = []

    def cancel():
        calls.append(1)
        return len(calls) > 3

    with pytest.raises(Cancelled):
        run_array(network(conv_net()), array, make_plan(array, 4, tile=32), cancel=cancel)
    assert len(calls) == 4


def test_progress_counts_every_output_row():
    array, seen = picture(100, 60, 3, "uint8"), []
    run_array(network(conv_net()), array, make_plan(array, 4, tile=32), on_rows=seen.append)
    assert sum(seen) == 200
    assert len(seen) > 2


def test_over_budget_shrinks_the_batch_and_says_so():
    # In float32: at 8 bits a difference of rounding would now and then be a level.
    array = picture(60, 300, 3, "uint8").astype(np.float32) / 255
    plan = make_plan(array, 4, tile=32, batch=8)
    plain, _ = run_array(network(conv_net()), array, plan)
    result, outcome = run_array(network(conv_net()), array, plan, over_budget=lambda: True)
    assert "over the budget: batch size 4 from" in outcome.events[0]
    np.testing.assert_allclose(result, plain, rtol=0, atol=1e-6)


def test_non_finite_low_precision_is_redone_in_fp32():
    class Overflowing(torch.nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.dtype = dtype

        def forward(self, x):
            big = x.to(self.dtype) * 60000 * 4  # beyond fp16, fine in fp32
            return (big / (60000 * 4)).float()

    net = network(
        Overflowing(torch.float16),
        scale=1,
        precision="fp16",
        make_fp32_forward=lambda: Overflowing(torch.float32),
    )
    array = picture(40, 40, 3, "uint8")
    result, outcome = run_array(net, array, make_plan(array, 0, scale=1, tile=32))
    np.testing.assert_array_equal(result, array)
    assert outcome.fp32_reruns > 0


def test_non_finite_fp32_is_an_error():
    class Broken(torch.nn.Module):
        def forward(self, x):
            return x / 0

    array = picture(40, 40, 3, "uint8")
    with pytest.raises(LowtideError, match="not finite"):
        run_array(network(Broken(), scale=1), array, make_plan(array, 0, scale=1))


def test_no_result_is_held_while_the_next_is_computed():
    module, array = conv_net(), picture(60, 150, 3, "uint8")
    net = network(module)
    storages, held = [], []

    def forward(images):
        held.append(sum(storage() is not None for storage in storages))
        result = module(images)
        storages.append(weakref.ref(result.untyped_storage()))
        return result

    run_array(dataclasses.replace(net, forward=forward), array, make_plan(array, 4, tile=32))
    assert len(held) > 10
    assert set(held) == {0}
