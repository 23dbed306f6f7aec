"""Candidates and their ledgers: what the user fixed is respected, what is asked is priced."""

import numpy as np
import pytest

from lowtide import BudgetError, UsageError
from lowtide.core.units import GIB, MIB
from lowtide.memory.budget import Budget
from lowtide.memory.choice import choose_plan
from lowtide.memory.costs import BLOCK_SIZES, ProbePoint, ReusedBlockBytes, TracedPoint
from lowtide.memory.prediction.calibration import BoundCalibration, RunBounds
from lowtide.streaming.planner.ledger_rows import (
    activation_row,
    affordable_pixels,
    comparable_pixels,
)
from lowtide.streaming.planner.model_facts import ImageTask, ModelGeometry, PlanOverrides
from lowtide.streaming.planner.tile_candidates import tile_candidates
from support.toy_models import costs, make_plan

PHOTO = (2000, 3000, 3)
SHAPE = ModelGeometry(2, 3, 3)


def plans(reach=4, *, shape=SHAPE, picture=None, batchable=True, device="cpu", **wishes):
    picture = picture or ImageTask(PHOTO, PHOTO[:2])
    measured = costs(reach, batchable=batchable, device=device)
    return tile_candidates(measured, shape, picture, PlanOverrides(**wishes))


def strategies(*args, **wishes):
    return [plan.strategy for plan in plans(*args, **wishes)]


def test_wishes_are_respected():
    assert {one.name for one in strategies()} == {"whole", "tiled"}
    assert {one.name for one in strategies(strategy="whole")} == {"whole"}
    assert {(one.tile_width, one.tile_height) for one in strategies(tile=200)} == {(200, 200)}
    assert {one.batch for one in strategies(batch=3, strategy="tiled")} == {3}
    assert {one.overlap for one in strategies(overlap=20, strategy="tiled")} == {20}
    assert {one.blend for one in strategies(hann_blend=True, strategy="tiled")} == {16}
    assert {one.blend for one in strategies(strategy="tiled")} == {0}


def test_overlap_comes_from_the_reach_and_blending_adds_to_it():
    assert {one.overlap for one in strategies(9, strategy="tiled")} == {18}
    blended = plans(9, strategy="tiled", hann_blend=True)
    assert {(plan.strategy.overlap, plan.accuracy) for plan in blended} == {(34, "exact")}
    unbounded = plans(None, strategy="tiled")
    assert {plan.accuracy for plan in unbounded} == {"bounded"}
    assert {(plan.strategy.overlap, plan.strategy.blend) for plan in unbounded} == {(32, 16)}


def test_tiles_of_a_plan_hold_no_more_than_their_number_needs():
    """1730 pixels in four columns: tiles of 512 would share a fifth of themselves."""
    picture = ImageTask((1156, 1730, 3), (1156, 1730))
    for one in strategies(7, picture=picture, strategy="tiled"):
        run = one.tile_width * one.tile_height * one.tiles
        needed = 1730 * 1156 + one.tiles * (one.tile_width + one.tile_height) * (14 + 8)
        assert run <= needed
    # What the user fixed stays as it is.
    assert {one.tile_width for one in strategies(7, picture=picture, tile=512)} == {512}


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (dict(tile=6), "too small"),
        (dict(overlap=0, hann_blend=True, strategy="tiled"), "needs an overlap"),
    ],
)
def test_contradictions_are_named(wishes, words):
    with pytest.raises(UsageError, match=words) as caught:
        plans(**wishes)
    assert caught.value.hint


def test_a_batch_is_refused_for_models_that_mix_it():
    with pytest.raises(UsageError, match="mixes the images"):
        plans(batch=2, batchable=False)
    assert {one.batch for one in strategies(batchable=False, device="cuda:0")} == {1}


def test_batches_are_tried_where_they_gain():
    assert {one.batch for one in strategies()} == {1}
    assert len({one.batch for one in strategies(device="cuda:0")}) > 2


def test_no_batch_is_larger_than_a_row_of_tiles():
    """Neighbors in a row run at once: what a fuller batch would take is never taken."""
    narrow = ImageTask((400, 600, 3), (400, 600))
    asked, enough = (plans(7, picture=narrow, tile=512, batch=batch) for batch in (16, 2))
    assert {plan.strategy.batch for plan in asked} == {2}
    assert [plan.upper_bytes for plan in asked] == [plan.upper_bytes for plan in enough]


def test_models_that_must_see_everything_are_never_cut():
    shape = ModelGeometry(2, 3, 3, tileable=False)
    assert [one.name for one in strategies(shape=shape)] == ["whole"]
    for wish in (dict(tile=64), dict(overlap=8), dict(batch=2), dict(hann_blend=True)):
        with pytest.raises(UsageError, match="whole image"):
            plans(shape=shape, **wish)


def test_tiles_lie_on_the_models_grid_and_respect_its_minimum():
    shape = ModelGeometry(2, 3, 3, align=16, minimum=96)
    for one in strategies(shape=shape, picture=ImageTask(PHOTO, (2000, 3008)), strategy="tiled"):
        assert one.tile_width % 16 == one.tile_height % 16 == 0
        assert min(one.tile_width, one.tile_height) >= 96
    square = ModelGeometry(2, 3, 3, align=16, square=True)
    for one in strategies(shape=square, picture=ImageTask(PHOTO, (3008, 3008)), strategy="tiled"):
        assert one.tile_width == one.tile_height


def test_an_image_smaller_than_any_tile_is_one_tile():
    shape = ModelGeometry(2, 3, 3, align=512)
    picture = ImageTask((400, 500, 3), (512, 512))
    (only,) = strategies(shape=shape, picture=picture, strategy="tiled")
    assert (only.name, only.tiles) == ("whole", 1)


@pytest.mark.parametrize("wish", [dict(overlap=20), dict(batch=2), dict(hann_blend=True)])
def test_a_wish_about_tiles_asks_for_tiles(wish):
    assert {one.name for one in strategies(**wish)} == {"tiled"}


@pytest.mark.parametrize("width", [3000, 12000, 48000])
def test_wide_images_get_low_tiles(width):
    def buffers(plan):
        return sum(row.upper for row in plan.ledger if row.name in ("input rows", "output rows"))

    picture = ImageTask((2000, width, 3), (2000, width), row_buffer_bytes=40 * MIB)
    free = ImageTask(picture.shape, picture.padded_size)
    lowest = min(map(buffers, plans(picture=free, strategy="tiled")))
    kept = plans(picture=picture, strategy="tiled")
    assert kept
    assert max(map(buffers, kept)) <= max(40 * MIB, lowest)


def test_small_tiles_are_for_small_budgets():
    size = dict(shape=PHOTO, padded_size=(2000, 3000))
    ample = plans(picture=ImageTask(**size, ample_bytes=400 * MIB), strategy="tiled")
    assert min(plan.strategy.run_pixels for plan in ample) >= 240 * 240
    scarce = plans(picture=ImageTask(**size, ample_bytes=20 * MIB), strategy="tiled")
    assert min(plan.strategy.run_pixels for plan in scarce) == 64 * 64
    # Where small ones are faster, they stay.
    slower = [
        ProbePoint(
            pixels=side**2,
            peak_bytes=side**2 * 600,
            resident_bytes=side**2 * 900,
            seconds=side**2 * (1e-7 if side < 256 else 2e-7),
        )
        for side in (64, 128, 256)
    ]
    measured = costs(4).model_copy(update={"points": tuple(slower)})
    picture = ImageTask(**size, ample_bytes=400 * MIB)
    cached = tile_candidates(measured, SHAPE, picture, PlanOverrides(strategy="tiled"))
    assert min(plan.strategy.run_pixels for plan in cached) == 64 * 64


def test_the_ledger_prices_formats_scratch_and_alpha():
    base = plans(strategy="whole")[0]
    picture = ImageTask(
        PHOTO, (2000, 3000), codec_bytes=((20 * MIB, 50 * MIB),), scratch_bytes=7 * MIB
    )
    priced = plans(picture=picture, strategy="whole")[0]
    assert priced.upper_bytes == base.upper_bytes + 50 * MIB
    assert priced.predicted_bytes == base.predicted_bytes + 20 * MIB
    assert priced.bytes_at("disk") == 7 * MIB
    rgba = ImageTask((2000, 3000, 4), (2000, 3000), inputs=2)
    alpha = plans(picture=rgba, strategy="whole")[0]
    live = [plan.ledger[1].value for plan in (alpha, base)]
    assert live[0] == 2 * live[1]
    assert alpha.upper_bytes > 1.8 * base.upper_bytes


def test_blended_rows_cost_floats():
    def output_rows(**wishes):
        plan = plans(tile=256, batch=1, **wishes)[0]
        return next(row.value for row in plan.ledger if row.name == "output rows")

    assert output_rows(hann_blend=True) > 3 * output_rows()


def test_bounded_plans_price_the_run_that_measures_their_error():
    bounded, exact = plans(None, tile=256, batch=1)[0], plans(4, tile=256, batch=1)[0]
    assert bounded.strategy.run_pixels == 320 * 320
    assert exact.strategy.run_pixels == 256 * 256


def test_affordable_pixels_grow_with_the_budget_and_stay_within_it():
    array = np.empty((2000, 3000, 3), np.uint8)
    plan = make_plan(array, None, tile=256, batch=1)
    few = affordable_pixels(costs(None), plan, plan.strategy, plan.upper_bytes)
    many = affordable_pixels(costs(None), plan, plan.strategy, plan.upper_bytes + 500 * MIB)
    assert few == plan.strategy.run_pixels
    assert few < many
    assert costs(None).activation_bytes(many) < plan.upper_bytes + 500 * MIB


def test_what_is_compared_in_fp32_fits_beside_what_stays():
    array = np.empty((2000, 3000, 4), np.uint8)
    plan = make_plan(array, None, tile=256, batch=1)
    ample = comparable_pixels(costs(None), plan, 1 << 30)
    assert ample == 512 * 512 // 2  # color and opacity
    scarce = comparable_pixels(costs(None), plan, 160 * MIB)
    assert 64 * 64 <= scarce < ample
    assert 2 * costs(None).activation_bytes(2 * scarce) < 160 * MIB


def test_a_budget_below_the_smallest_plan_names_it():
    array = np.empty((2000, 3000, 3), np.uint8)
    with pytest.raises(BudgetError) as caught:
        make_plan(array, 4, budget=4 * MIB)
    again = make_plan(array, 4, budget=caught.value.smallest)
    assert again.upper_bytes <= caught.value.smallest
    assert f"{caught.value.smallest // MIB}MiB" in str(caught.value.hint)


def test_past_runs_narrow_the_bound_by_half_at_most_and_widen_it_as_needed():
    def bytes_with(calibration):
        size = PHOTO[:2]
        picture = ImageTask(PHOTO, size, tiled_bounds=RunBounds(current_heap=calibration))
        plan = plans(picture=picture, strategy="whole")[0]
        return plan.predicted_bytes, plan.upper_bytes

    def calibration(share, **more):
        return BoundCalibration(share=share, fixed_bytes=0, count=50, coverage=0.995, **more)

    expected, general = bytes_with(None)
    assert bytes_with(calibration(0.0)) == (expected, expected + (general - expected) // 2)
    assert bytes_with(calibration(5.0))[1] == pytest.approx(6 * expected, rel=1e-6)
    # Runs of many kinds of models stand by themselves.
    assert bytes_with(calibration(0.0, families=True))[1] == expected + 16 * MIB
    assert bytes_with(calibration(5.0, families=True))[1] == pytest.approx(6 * expected, rel=1e-6)


def test_past_runs_do_not_narrow_what_a_file_may_make_its_codec_take():
    known = BoundCalibration(share=0.1, fixed_bytes=0, count=50, coverage=0.99, families=True)

    def upper(*codecs, **more):
        bounds = RunBounds(current_heap=known)
        picture = ImageTask(PHOTO, PHOTO[:2], codec_bytes=codecs, tiled_bounds=bounds, **more)
        return plans(picture=picture, tile=64, batch=1)[0].upper_bytes

    bare, usual, most = upper(), 50 * MIB, 90 * MIB
    # The least margin is for windows of rows too.
    assert upper((usual, usual + 12 * MIB)) == bare + usual
    assert upper((usual, most)) == bare + most - 16 * MIB
    # What is encoded at the end is not added to what is held before: less is free of charge.
    held, low, high = (usual, usual), (40 * MIB, 60 * MIB), (300 * MIB, 400 * MIB)
    assert upper(held, finishing_bytes=low) == upper(held)
    finishing = upper(held, finishing_bytes=high)
    assert 400 * MIB < finishing < upper(held) + 400 * MIB - usual


@pytest.mark.parametrize("heap", ["cache", None])
def test_what_a_heap_keeps_is_told_by_the_blocks_of_the_run(monkeypatch, heap):
    monkeypatch.setattr("lowtide.streaming.planner.ledger_rows.heap_mode", lambda: heap)
    blocks = tuple(
        ReusedBlockBytes(at_run_peak=0, max_live=100 * side) for side in range(len(BLOCK_SIZES))
    )
    points = tuple(
        TracedPoint(pixels=side * side, peak_bytes=side * side * 600, reused_blocks=blocks)
        for side in (64, 128)
    )
    measured = costs(4).model_copy(update={"traced_points": points})
    (kept,) = (one for one in activation_row(measured, 64 * 64) if one.name == "allocator")
    told = blocks[-1].retained_bytes if heap else measured.slack_bytes(64 * 64)
    assert kept.value == told


def test_a_heap_that_gives_back_is_for_budgets_that_the_other_exceeds():
    kept = BoundCalibration(share=1.5, fixed_bytes=0, count=50, coverage=0.99, families=True)
    thrifty = kept.model_copy(update={"share": 0.05})
    bounds = RunBounds(current_heap=kept, trimming_heap=thrifty, can_trim=True)
    picture = ImageTask(PHOTO, PHOTO[:2], tiled_bounds=bounds)
    both = plans(picture=picture)
    by_heap = {
        heap: {plan.network_size: plan for plan in both if plan.heap == heap}
        for heap in ("cache", "trim")
    }
    assert by_heap["cache"].keys() == by_heap["trim"].keys()
    for size, plan in by_heap["cache"].items():
        other = by_heap["trim"][size]
        assert other.upper_bytes < plan.upper_bytes
        assert other.seconds > plan.seconds
        assert not any(row.value for row in other.ledger if row.name == "allocator")
    plenty = choose_plan(both, Budget(64 * GIB, 64 * GIB, 64 * GIB))
    assert plenty.heap == "cache"
    least = min(plan.upper_bytes for plan in both)
    scarce = choose_plan(both, Budget(least, 64 * GIB, 64 * GIB))
    assert scarce.heap == "trim"
    assert scarce.title.endswith("freed memory returned at once")
    assert {plan.heap for plan in plans()} == {"unchanged"}
