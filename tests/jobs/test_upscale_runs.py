"""How one image is run: options do what they say, and the report is true."""

import threading

import numpy as np
import pytest
from PIL import Image

import lowtide
from lowtide import BudgetError, Cancelled, UsageError
from lowtide.jobs.engine.devices import resolve_precision
from lowtide.jobs.upscale.settings import UpscaleSettings
from support.cpu_levels import assert_within_a_level

BUDGET = "256MiB"
MIB = 1 << 20


# How it is run


def test_strategies(run):
    whole, tiled = run("a.png", strategy="whole"), run("b.png", strategy="tiled")
    assert (whole.plan.strategy.name, whole.plan.strategy.tiles) == ("whole", 1)
    assert tiled.plan.strategy.name == "tiled"
    assert tiled.plan.strategy.tiles > 1


def test_tile_options_are_in_the_plan(run):
    plan = run(tile=32, tile_overlap=20, tile_batch_size=3, hann_blend=True).plan
    assert (
        plan.strategy.tile_width,
        plan.strategy.tile_height,
        plan.strategy.overlap,
        plan.strategy.batch,
    ) == (32, 32, 20, 3)
    assert plan.strategy.blend > 0
    assert run("b.png", tile=32, tile_overlap=20, hann_blend=False).plan.strategy.blend == 0


def test_no_blending_is_no_wish_for_tiles(run):
    image = run(hann_blend=False)
    assert (image.plan.strategy.name, image.accuracy.execution) == ("whole", "exact")
    assert run("b.png", strategy="tiled", hann_blend=False).plan.strategy.blend == 0


def test_too_little_overlap_is_bounded_and_measured(run, read, crop, expected):
    image = run(tile=32, tile_overlap=2)
    assert image.accuracy.execution == "bounded"
    error = image.accuracy.execution_error
    assert error.reference == "the whole image"
    assert 0 < error.tiles_sampled <= error.tiles_total == image.plan.strategy.tiles
    difference = np.abs(read(image.output).astype(float) - expected(crop)) / 255
    true_db = -10 * np.log10(np.square(difference).mean())
    # Sampled, and rounded to 8 bits on the way; yet of the size that it claims.
    assert true_db > error.psnr_db - 3
    assert 0 < error.max_error < 0.2


def test_bf16_says_what_it_costs(run, read, crop, expected):
    image = run(precision="bf16")
    assert image.plan.precision == image.accuracy.precision == "bf16"
    error = image.accuracy.precision_error
    assert error.reference == "fp32"
    # What enters, what leaves and what is added to stays in fp32.
    assert image.accuracy.precision_note == "all but the first and the last convolution"
    assert 65 < error.psnr_db < 90
    difference = read(image.output).astype(int) - expected(crop)
    assert 0 < np.abs(difference).max() <= 2


def test_precisions_that_a_model_lacks_are_refused(model):
    from dataclasses import replace

    wide = replace(model.descriptor, supports_half=False)
    with pytest.raises(UsageError, match="does not run in fp16") as caught:
        resolve_precision("fp16", wide, "cpu")
    assert caught.value.hint == "--precision bf16 or fp32"
    assert resolve_precision("fp16", model.descriptor, "cpu") == "fp16"
    assert resolve_precision("auto", model.descriptor, "cpu") == "fp32"


# Its memory


@pytest.mark.own_process
def test_the_report_on_memory_adds_up(run):
    image = run(tile=64)
    memory = image.memory
    assert memory.budget_bytes == 256 * MIB
    assert memory.peak_bytes <= memory.budget_bytes
    assert memory.within_budget
    assert memory.predicted_bytes == sum(row.value for row in memory.ledger)
    assert memory.upper_bytes == sum(row.upper for row in memory.ledger) <= memory.budget_bytes
    assert {"weights", "live activations and workspace", "output rows", "file formats"} <= {
        row.name for row in memory.ledger
    }
    assert image.status == "done"
    assert image.cpu_seconds > 0
    assert 0 < image.seconds < 60


def test_a_smaller_budget_makes_smaller_tiles(run, monkeypatch):
    # Another test may have run the command line, whose heap has bounds of its own.
    monkeypatch.setattr("lowtide.core.heap._tuned", False)
    large = run("a.png")
    small = run("b.png", budget=large.plan.upper_bytes - MIB)
    assert large.plan.strategy.name == "whole"
    assert small.plan.strategy.tiles > 1
    assert small.plan.upper_bytes <= large.plan.upper_bytes - MIB
    assert any("needs up to" in refusal.reason for refusal in small.plan.refused)


def test_the_smallest_budget_named_is_one_that_works(run, tmp_path):
    with pytest.raises(BudgetError, match=r"no plan fits in 3\.00 MiB") as caught:
        run(budget="3MiB")
    smallest = caught.value.smallest
    assert caught.value.hint == f"--budget {smallest // MIB}MiB"
    with pytest.raises(BudgetError):
        run(budget=smallest - MIB)
    assert not (tmp_path / "out.png").exists()
    assert run(budget=smallest).memory.within_budget


def test_a_disk_budget_counts_scratch_files(tmp_path, run, crop):
    exif = Image.Exif()
    exif[0x0112] = 6
    # Large enough that turning it takes a scratch file.
    Image.fromarray(np.tile(crop, (8, 8, 1))).save(tmp_path / "turned.png", exif=exif)
    planned = lowtide.plan(tmp_path / "turned.png", tmp_path / "out.png", budget=BUDGET)
    scratch = [row for row in planned.images[0].plan.ledger if row.place == "disk"]
    assert len(scratch) == 1
    assert scratch[0].value >= 2 * MIB
    with pytest.raises(BudgetError, match="of disk space") as caught:
        run(given=tmp_path / "turned.png", disk_budget="1MiB")
    assert "--disk-budget" in caught.value.hint


# Watching and stopping it


def test_progress_reports_every_phase(source, tmp_path):
    moments = []
    lowtide.upscale(source, tmp_path / "out.png", budget=BUDGET, tile=32, progress=moments.append)
    assert [moment.phase for moment in moments[:2]] == ["load", "run"]
    assert moments[-1].phase == "done"
    running = [moment for moment in moments if moment.phase == "run"]
    rows = [moment.done for moment in running]
    assert rows[0] == 0
    assert rows == sorted(set(rows))
    assert rows[-1] == running[-1].total == 200
    assert {moment.name for moment in running} == {"photo.png"}
    assert {moment.budget_bytes for moment in running} == {256 * MIB}
    assert running[0].eta is None
    assert running[-1].eta == 0


@pytest.mark.parametrize("kind", ["event", "callable"])
def test_a_stop_leaves_nothing_behind(source, tmp_path, kind):
    stop = threading.Event()

    def watch(moment):
        if moment.done > 0:
            stop.set()

    cancel = stop if kind == "event" else stop.is_set
    target = tmp_path / "new" / "folder" / "out.png"
    with pytest.raises(Cancelled):
        lowtide.upscale(source, target, budget=BUDGET, tile=32, progress=watch, cancel=cancel)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.png"]


def test_a_plan_writes_nothing(source, tmp_path):
    planned = lowtide.plan(source, tmp_path / "out" / "a.png", budget=BUDGET, tile=32)
    assert planned.images[0].status == "planned"
    assert planned.images[0].plan.strategy.tile_width == 32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.png"]


def test_the_plan_is_what_is_run(source, tmp_path):
    planned = lowtide.plan(source, tmp_path / "a.png", budget=BUDGET).images[0].plan
    done = lowtide.upscale(source, tmp_path / "a.png", budget=BUDGET).images[0].plan
    assert planned == done


# Bands


@pytest.mark.parametrize("bands", [1, 4])
def test_streamed_equals_the_plain_model(tmp_path, run, save, read, crop, expected, bands):
    array = np.zeros((60, 70, bands), np.uint8)
    array[..., : min(bands, 3)] = crop[:60, :70, : min(bands, 3)]
    array[..., 3:] = 255
    image = run(given=save(tmp_path / "bands.png", array), strategy="streamed")
    assert image.plan.strategy.name == "streamed"
    assert image.accuracy.execution == "exact"
    assert "on a small image" in image.accuracy.reason
    assert image.memory.within_budget
    assert_within_a_level(read(image.output)[..., :3], expected(array[..., : min(bands, 3)]))


def test_a_streamed_run_can_be_replayed(tmp_path, run, read):
    first = run("a.png", strategy="streamed")
    (tmp_path / "plan.json").write_text(first.plan.model_dump_json())
    again = run("b.png", plan_file=tmp_path / "plan.json")
    assert again.plan.strategy == first.plan.strategy
    np.testing.assert_array_equal(read(first.output), read(again.output))


def test_no_bands_are_planned_for_what_is_done_sooner(run):
    reasons = {refusal.title: refusal.reason for refusal in run().plan.refused}
    assert "not considered" in reasons["streamed"]


def test_exact_is_the_default_and_refuses_tiles_that_would_differ(run):
    with pytest.raises(UsageError, match="no exact plan is possible") as caught:
        run(accuracy="exact", tile=32, tile_overlap=4)
    assert "--accuracy bounded" in caught.value.hint
    assert run("b.png", tile=32, tile_overlap=4).accuracy.execution == "bounded"


def test_tiles_are_not_for_streaming():
    with pytest.raises(UsageError, match="has no tiles"):
        UpscaleSettings.of(strategy="streamed", tile=32)


def test_an_accuracy_together_with_a_plan_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--plan"):
        UpscaleSettings.of(accuracy="exact", plan_file=tmp_path / "plan.json")
