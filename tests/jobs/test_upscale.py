"""One image through the whole job: every option does what it says, and the report is true."""

import json
import threading

import numpy as np
import pytest
from PIL import Image, ImageCms

import lowtide
from lowtide import BudgetError, Cancelled, ImageError, ModelError, UsageError
from lowtide.jobs.devices import resolve_precision
from lowtide.jobs.settings import UpscaleSettings

BUDGET = "256MiB"
ICC = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
MIB = 1 << 20


@pytest.fixture
def run(source, tmp_path):
    """Upscale the small picture (or ``given``) with these options; returns its report."""

    def upscale(name="out.png", given=None, **options):
        options = {"budget": BUDGET, **options}
        return lowtide.upscale(given or source, tmp_path / name, **options).images[0]

    return upscale


def assert_within_a_level(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert np.abs(a.astype(int) - b.astype(int)).max() <= 1


# The picture


@pytest.mark.parametrize("options", [{}, {"tile": 32}, {"tile": 40, "hann_blend": True}])
def test_equals_the_plain_model(run, read, crop, expected, options):
    image = run(**options)
    assert image.accuracy.execution == "exact"
    assert (image.plan.tiles > 1) == bool(options)
    assert_within_a_level(read(image.output), expected(crop))


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_every_kind_of_image_keeps_its_bands(tmp_path, run, save, read, crop, expected, bands):
    array = np.zeros((60, 70, bands), np.uint8)
    array[..., : 1 if bands < 3 else 3] = crop[:60, :70, : 1 if bands < 3 else 3]
    if bands in (2, 4):
        array[..., -1] = 255
        array[:, :20, -1] = 0
    image = run(given=save(tmp_path / "bands.png", array), tile=32)
    result = read(image.output)
    assert result.shape == (120, 140, bands)
    if bands in (1, 3):
        assert_within_a_level(result, expected(array))
    else:
        # Opaque stays opaque and clear stays clear, right up to where they meet.
        assert (result[:, 48:, -1] == 255).all()
        assert (result[:, :32, -1] == 0).all()


def test_sixteen_bits_stay_sixteen_bits(tmp_path, run, read, expected):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    image = run(given=tmp_path / "ramp.png")
    result = read(image.output)
    assert result.dtype == np.uint16
    assert len(np.unique(result)) > 60_000
    assert_within_a_level(result, expected(ramp[..., None]))


def test_the_profile_stays_and_the_orientation_is_applied_once(tmp_path, run, read, crop, expected):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "Maker"
    given = tmp_path / "turned.png"
    Image.fromarray(crop).save(given, icc_profile=ICC, exif=exif)
    image = run(given=given, tile=48)
    upright = np.ascontiguousarray(np.rot90(crop, -1))
    assert_within_a_level(read(image.output), expected(upright))
    with Image.open(image.output) as made:
        assert made.info["icc_profile"] == ICC
        assert made.getexif().get(0x0112, 1) == 1
        assert made.getexif()[0x010F] == "Maker"


def test_strip_metadata_keeps_the_profile_only(tmp_path, run, crop):
    exif = Image.Exif()
    exif[0x010F] = "Maker"
    Image.fromarray(crop).save(tmp_path / "tagged.png", icc_profile=ICC, exif=exif)
    image = run(given=tmp_path / "tagged.png", strip_metadata=True)
    with Image.open(image.output) as made:
        assert made.info["icc_profile"] == ICC
        assert 0x010F not in made.getexif()


def test_the_same_job_makes_the_same_bytes(run, tmp_path):
    run("a.png", tile=32)
    run("b.png", tile=32)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


# Its size


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"scale": 2}, (240, 200)),
        ({"scale": 1.5}, (180, 150)),
        ({"model": "lowtide-x2", "scale": 3}, (360, 300)),
        ({"scale": 0.5}, (60, 50)),
        ({"width": 150}, (150, 125)),
        ({"height": 150}, (180, 150)),
        ({"width": 130, "height": 210}, (130, 210)),
        ({"max_side": 200}, (200, 167)),
    ],
)
def test_target_sizes(run, read, options, size):
    image = run(**options)
    assert (image.out_width, image.out_height) == size
    assert read(image.output).shape == (size[1], size[0], 3)
    resized = any("then resized to" in note for note in image.notes)
    assert resized == (size != (240, 200))


def test_a_larger_scale_takes_the_larger_model(run, source, tmp_path):
    settings = UpscaleSettings.of
    assert [settings(scale=s).model_name for s in (None, 2, 2.1)] == [
        "lowtide-x2", "lowtide-x2", "lowtide-x4",
    ]  # fmt: skip
    planned = lowtide.plan(source, tmp_path / "out.png", budget=BUDGET, scale=3)
    assert planned.model["name"] == "lowtide-x4"
    assert run(scale=4).out_width == 480


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": 2, "width": 100}, "--scale and --width/--height contradict"),
        ({"max_side": 300, "height": 100}, "--width/--height and --max-side contradict"),
        ({"strategy": "whole", "tile": 64}, "has no tiles"),
        ({"strategy": "whole", "tile_overlap": 0}, "has no tiles"),
        ({"tile": 4}, "--tile 4 is too small"),
        ({"hann_blend": True, "tile_overlap": 0, "tile": 64}, "blending needs an overlap"),
        ({"scale": 0}, "--scale 0: "),
        ({"png_compression": 10}, "--png-compression 10: "),
        ({"precision": "fp4"}, "--precision 'fp4': "),
        ({"sharpness": 3}, "--sharpness 3: "),
        ({"device": "cuda:7"}, "cuda:7.*this machine has"),
        ({"device": "toaster"}, "is not a device of this machine"),
        ({"format": "bmp"}, "not an image format"),
        ({"budget": "lots"}, "not a number of bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(run, tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        run(**options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.png"]


# Its file


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [
        ("out.png", {"png_compression": 9}, {"png_compression": 0}),
        ("out.jpg", {"jpeg_quality": 40}, {"jpeg_quality": 98}),
        ("out.webp", {"webp_quality": 40}, {"webp_quality": 98}),
        ("out.webp", {}, {"webp_lossless": True}),
        ("out.avif", {"avif_quality": 30}, {"avif_quality": 90}),
        ("out.tif", {"tiff_compression": "deflate"}, {"tiff_compression": "none"}),
        ("out.tif", {"tiff_compression": "lzw"}, {"tiff_compression": "none"}),
    ],
)
def test_encoder_options_reach_the_encoder(run, tmp_path, name, small, large):
    sizes = [
        (run(name, force=True, **options), (tmp_path / name).stat().st_size)[1]
        for options in (small, large)
    ]
    assert sizes[0] < 0.9 * sizes[1]


def test_lossless_webp_has_the_pixels_of_png(run, read):
    png, webp = run("a.png"), run("a.webp", webp_lossless=True)
    np.testing.assert_array_equal(read(png.output), read(webp.output))


def test_format_names_the_files_of_a_folder(source, tmp_path):
    report = lowtide.upscale(source, tmp_path / "out", format="webp", budget=BUDGET)
    assert [image.output for image in report.images] == [str(tmp_path / "out" / "photo.webp")]
    assert (tmp_path / "out" / "photo.webp").read_bytes()[8:12] == b"WEBP"


def test_nothing_is_overwritten_without_force(run, read, tmp_path):
    target = tmp_path / "out.png"
    target.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        run()
    assert target.read_text() == "precious"
    run(force=True)
    assert read(target).shape == (200, 240, 3)


def test_max_pixels(run, source):
    with pytest.raises(ImageError, match="the limit is 10"):
        run(max_pixels=10)
    assert run(max_pixels=12_000).status == "done"
    with pytest.raises(ImageError, match="over 64 times --max-pixels"):
        run("b.png", max_pixels=12_000, scale=40)


def test_sidecar(run, tmp_path):
    image = run(sidecar=True)
    kept = json.loads((tmp_path / "out.png.lowtide.json").read_text())
    assert kept["schema_version"] == 1
    assert kept["model"]["name"] == "lowtide-x2"
    assert kept["image"] == image.model_dump(mode="json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.png", "out.png.lowtide.json", "photo.png",
    ]  # fmt: skip


def test_a_model_may_be_a_path(run, tmp_path):
    from lowtide.models.bundled import find

    (tmp_path / "mine.safetensors").write_bytes(find("lowtide-x2").path.read_bytes())
    assert run(model=tmp_path / "mine.safetensors").status == "done"
    with pytest.raises(ModelError, match="does not exist"):
        run("b.png", model=tmp_path / "other.safetensors")


# How it is run


def test_strategies(run):
    whole, tiled = run("a.png", strategy="whole"), run("b.png", strategy="tiled")
    assert (whole.plan.strategy, whole.plan.tiles) == ("whole", 1)
    assert tiled.plan.strategy == "tiled"
    assert tiled.plan.tiles > 1


def test_tile_options_are_in_the_plan(run):
    plan = run(tile=32, tile_overlap=20, tile_batch_size=3, hann_blend=True).plan
    assert (plan.tile_width, plan.tile_height, plan.overlap, plan.batch) == (32, 32, 20, 3)
    assert plan.blend > 0
    assert run("b.png", tile=32, tile_overlap=20, hann_blend=False).plan.blend == 0


def test_no_blending_is_no_wish_for_tiles(run):
    image = run(hann_blend=False)
    assert (image.plan.strategy, image.accuracy.execution) == ("whole", "exact")
    assert run("b.png", strategy="tiled", hann_blend=False).plan.blend == 0


def test_too_little_overlap_is_bounded_and_measured(run, read, crop, expected):
    image = run(tile=32, tile_overlap=2)
    assert image.accuracy.execution == "bounded"
    error = image.accuracy.execution_error
    assert error.against == "the whole image"
    assert 0 < error.tiles_sampled <= error.tiles_total == image.plan.tiles
    difference = np.abs(read(image.output).astype(float) - expected(crop)) / 255
    true_db = -10 * np.log10(np.square(difference).mean())
    # Sampled, and rounded to 8 bits on the way; yet of the size that it claims.
    assert true_db > error.psnr_db - 3
    assert 0 < error.max_error < 0.2


def test_bf16_says_what_it_costs(run, read, crop, expected):
    image = run(precision="bf16")
    assert image.plan.precision == image.accuracy.precision == "bf16"
    error = image.accuracy.precision_error
    assert error.against == "fp32"
    # What enters, what leaves and what is added to stays in fp32.
    assert image.accuracy.precision_why == "all but the first and the last convolution"
    assert 65 < error.psnr_db < 90
    difference = read(image.output).astype(int) - expected(crop)
    assert 0 < np.abs(difference).max() <= 2


def test_precisions_that_a_model_lacks_are_refused(model):
    from dataclasses import replace

    wide = replace(model.descriptor, supports_half=False)
    with pytest.raises(UsageError, match="does not run in fp16") as caught:
        resolve_precision("fp16", wide, "cpu")
    assert caught.value.hint == "--precision bf16 or fp32 or int8"
    assert resolve_precision("fp16", model.descriptor, "cpu") == "fp16"
    assert resolve_precision("auto", model.descriptor, "cpu") == "fp32"


# Its memory


def test_the_report_on_memory_adds_up(run):
    image = run(tile=64)
    memory = image.memory
    assert memory.budget_bytes == 256 * MIB
    assert memory.peak_bytes <= memory.budget_bytes
    assert memory.within_budget
    assert memory.predicted_bytes == sum(row.value for row in memory.ledger)
    assert memory.upper_bytes == sum(row.upper for row in memory.ledger) <= memory.budget_bytes
    assert {"weights", "live activations and scratch", "output rows", "file formats"} <= {
        row.name for row in memory.ledger
    }
    assert image.status == "done"
    assert image.cpu_seconds > 0
    assert 0 < image.seconds < 60


def test_a_smaller_budget_makes_smaller_tiles(run, monkeypatch):
    # Another test may have run the command line, whose heap has bounds of its own.
    monkeypatch.setattr("lowtide.core.heap._tuned", False)
    large, small = run("a.png"), run("b.png", budget="58MiB")
    assert large.plan.strategy == "whole"
    assert small.plan.tiles > 1
    assert small.plan.upper_bytes <= 58 * MIB
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
    with pytest.raises(BudgetError, match="of disk memory") as caught:
        run(given=tmp_path / "turned.png", disk_budget="1MiB")
    assert "--disk-budget" in caught.value.hint


# Watching and stopping it


def test_progress_tells_the_whole_story(source, tmp_path):
    moments = []
    lowtide.upscale(
        source, tmp_path / "out.png", budget=BUDGET, tile=32, progress=moments.append
    )
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
    assert planned.images[0].plan.tile_width == 32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.png"]


def test_the_plan_is_what_is_run(source, tmp_path):
    planned = lowtide.plan(source, tmp_path / "a.png", budget=BUDGET).images[0].plan
    done = lowtide.upscale(source, tmp_path / "a.png", budget=BUDGET).images[0].plan
    assert planned == done


# Bands


@pytest.mark.parametrize("bands", [1, 3, 4])
def test_streamed_equals_the_plain_model(tmp_path, run, save, read, crop, expected, bands):
    array = np.zeros((60, 70, bands), np.uint8)
    array[..., : min(bands, 3)] = crop[:60, :70, : min(bands, 3)]
    array[..., 3:] = 255
    image = run(given=save(tmp_path / "bands.png", array), strategy="streamed")
    assert image.plan.strategy == "streamed"
    assert image.accuracy.execution == "exact"
    assert "on a small image" in image.accuracy.why
    assert image.memory.within_budget
    assert_within_a_level(read(image.output)[..., :3], expected(array[..., : min(bands, 3)]))


def test_a_streamed_run_can_be_replayed(tmp_path, run, read):
    first = run("a.png", strategy="streamed")
    (tmp_path / "plan.json").write_text(first.plan.model_dump_json())
    again = run("b.png", plan_file=tmp_path / "plan.json")
    assert again.plan.banded == first.plan.banded
    np.testing.assert_array_equal(read(first.output), read(again.output))


def test_no_bands_are_planned_for_what_is_done_sooner(run):
    told = {refusal.what: refusal.reason for refusal in run().plan.refused}
    assert "not looked at" in told["streamed"]


def test_exact_is_the_default_and_refuses_tiles_that_would_differ(run):
    with pytest.raises(UsageError, match="no exact plan is possible") as caught:
        run(accuracy="exact", tile=32, tile_overlap=4)
    assert "--accuracy bounded" in caught.value.hint
    assert run("b.png", tile=32, tile_overlap=4).accuracy.execution == "bounded"


def test_tiles_are_not_for_streaming():
    with pytest.raises(UsageError, match="has no tiles"):
        UpscaleSettings.of(strategy="streamed", tile=32)


def test_an_accuracy_beside_a_plan_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--plan"):
        UpscaleSettings.of(accuracy="exact", plan_file=tmp_path / "plan.json")
