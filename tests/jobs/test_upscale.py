"""One image through the whole job: the picture, its size and its file."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

import lowtide
from lowtide import ImageError, ModelError, UsageError
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.models.resample import resize_cubic
from support.cpu_levels import assert_within_a_level
from support.image_folders import statuses

BUDGET = "256MiB"
ICC = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


# The picture


@pytest.mark.parametrize("options", [{}, {"tile": 32}, {"tile": 40, "hann_blend": True}])
def test_equals_the_plain_model(run, read, crop, expected, options):
    image = run(**options)
    assert image.accuracy.execution == "exact"
    assert (image.plan.strategy.tiles > 1) == bool(options)
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


@pytest.mark.parametrize("options", [{}, {"scale": 1.37}, {"scale": 0.5}])
def test_a_picture_shows_the_same_detail_before_and_after(tmp_path, save, read, photo, options):
    """Before is what a cubic filter makes of the whole input, there; also of odd sizes."""
    pytest.importorskip("matplotlib")
    before = np.full((260, 390, 3), 90, np.uint8)
    before[60:220, 130:330] = photo[100:260, 200:400]
    source, path = save(tmp_path / "in.png", before), tmp_path / "picture.png"
    given = {"budget": BUDGET, "comparison": path, **options}
    report = lowtide.upscale(source, tmp_path / "large.png", **given)
    made, drawn = read(report.images[0].output), read(path)[..., :3]
    cubic = resize_cubic(before / 255, *made.shape[:2]).clip(0, 1) * 255
    height, width = (min(side, 480) for side in made.shape[:2])
    cell = max(width, 200) + 8
    panels = [drawn[24 : 24 + height, left : left + width] for left in (8, 8 + cell)]
    places = [
        (top, left)
        for top in range(made.shape[0] - height + 1)
        for left in range(made.shape[1] - width + 1)
        if (made[top, left] == panels[1][0, 0]).all()
        and (made[top : top + height, left : left + width] == panels[1]).all()
    ]
    assert places
    top, left = places[0]
    assert abs(cubic[top : top + height, left : left + width] - panels[0]).max() <= 1
    with pytest.raises(UsageError, match="already exists"):
        lowtide.upscale(source, tmp_path / "again.png", **given)
    with pytest.raises(UsageError, match="--comparison draws one file"):
        lowtide.upscale([source, path], tmp_path / "out", **given)
    assert not (tmp_path / "again.png").exists()


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


SIZES = [
    ({"scale": 2}, (240, 200)),
    ({"scale": 1.5}, (180, 150)),
    ({"model": "lowtide-x2", "scale": 3}, (360, 300)),
    ({"scale": 0.5}, (60, 50)),
    ({"width": 150}, (150, 125)),
    ({"height": 150}, (180, 150)),
    ({"width": 130, "height": 210}, (130, 210)),
    ({"max_side": 200}, (200, 167)),
]


def test_target_sizes(run, read):
    for options, size in SIZES:
        image = run(force=True, **options)
        assert (image.out_width, image.out_height) == size, options
        assert read(image.output).shape == (size[1], size[0], 3)
        resized = any("which is resized to" in note for note in image.notes)
        assert resized == (size != (240, 200))


def test_a_larger_scale_takes_the_larger_model(run, source, tmp_path):
    settings = UpscaleSettings.of
    assert [settings(scale=s).model_name for s in (None, 2, 2.1)] == [
        "lowtide-x2",
        "lowtide-x2",
        "lowtide-x4",
    ]
    planned = lowtide.plan(source, tmp_path / "out.png", budget=BUDGET, scale=3)
    assert planned.model["name"] == "lowtide-x4"
    assert run(scale=4).out_width == 480


REFUSED = [
    ({"scale": 2, "width": 100}, "--scale and --width/--height contradict"),
    ({"max_side": 300, "height": 100}, "--width/--height and --max-side contradict"),
    ({"strategy": "whole", "tile": 64}, "has no tiles"),
    ({"strategy": "whole", "tile_overlap": 0}, "has no tiles"),
    ({"tile": 4}, "--tile 4 is too small"),
    ({"hann_blend": True, "tile_overlap": 0, "tile": 64}, "blending needs an overlap"),
    ({"scale": 0}, "--scale 0 has to be above 0$"),
    ({"scale": float("nan")}, "--scale nan has to be"),
    ({"png_compression": 10}, "--png-compression 10 has to be at most 9$"),
    ({"width": 1.5}, "--width 1.5 is not a whole number$"),
    ({"precision": "fp4"}, "--precision fp4 is not one of 'auto', "),
    ({"sharpness": 3}, "there is no setting 'sharpness'"),
    ({"suffix": "a/b"}, "--suffix 'a/b' cannot be part of a file name"),
    ({"suffix": "a\nb"}, "cannot be part of a file name"),
    ({"suffix": "_x2"}, "out.png is a file's own name"),
    ({"format": "jpg"}, "--format jpg contradicts the name .*out.png"),
    ({"device": "cuda:7"}, "cuda:7.*this machine has"),
    ({"device": "toaster"}, "is not a device of this machine"),
    ({"format": "bmp"}, "'bmp' names no image format"),
    ({"budget": "lots"}, "not a number of bytes"),
]


def test_invalid_values_are_refused(run, tmp_path):
    for options, words in REFUSED:
        with pytest.raises(UsageError, match=words):
            run(**options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.png"]


def test_settings_that_change_bytes_are_in_the_hash():
    """A field that is forgotten would let a resumed folder keep files of other settings."""
    same = {
        *("budget", "host_budget", "disk_budget", "scratch", "device", "devices", "streams"),
        *("model", "max_pixels", "suffix"),  # the model is hashed by its content
    }
    plain = UpscaleSettings.of()
    for name in {field.name for field in fields(UpscaleSettings)} - {"plan_file"}:
        other = replace(plain, **{name: 7})
        hashes = {one.content_hash("model", "fp32") for one in (plain, other)}
        assert (len(hashes) == 1) == (name in same), name


# Its file


ENCODERS = [
    ("out.png", {"png_compression": 9}, {"png_compression": 0}),
    ("out.jpg", {"jpeg_quality": 40}, {"jpeg_quality": 98}),
    ("out.webp", {"webp_quality": 40}, {"webp_quality": 98}),
    ("out.webp", {}, {"webp_lossless": True}),
    ("out.avif", {"avif_quality": 30}, {"avif_quality": 90}),
    ("out.tif", {"tiff_compression": "deflate"}, {"tiff_compression": "none"}),
    ("out.tif", {"tiff_compression": "lzw"}, {"tiff_compression": "none"}),
]


def test_encoder_options_reach_the_encoder(run, tmp_path):
    for name, small, large in ENCODERS:
        sizes = [
            (run(name, force=True, **options), (tmp_path / name).stat().st_size)[1]
            for options in (small, large)
        ]
        assert sizes[0] < 0.9 * sizes[1], (name, small)


def test_lossless_webp_has_the_pixels_of_png(run, read):
    png, webp = run("a.png"), run("a.webp", webp_lossless=True)
    np.testing.assert_array_equal(read(png.output), read(webp.output))


def test_format_names_the_files_of_a_folder(source, tmp_path):
    report = lowtide.upscale(source, f"{tmp_path}/out/", format="webp", budget=BUDGET)
    assert [image.output for image in report.images] == [str(tmp_path / "out" / "photo.webp")]
    assert (tmp_path / "out" / "photo.webp").read_bytes()[8:12] == b"WEBP"


@pytest.mark.parametrize(("format", "kind"), [(None, "PNG"), ("webp", "WEBP")])
def test_a_name_without_a_suffix_is_a_file_too(run, read, tmp_path, format, kind):
    """In the format of the input, or the one that is asked for."""
    image = run("large", format=format)
    with Image.open(tmp_path / "large") as made:
        assert made.format == kind
    assert read(image.output).shape == (200, 240, 3)
    assert any(note.startswith("the name has no suffix: written as ") for note in image.notes)


def test_a_suffix_goes_between_name_and_extension(source, tmp_path):
    """Next to their inputs, too, where results are not taken for inputs the next time."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.png").write_bytes(source.read_bytes())
    for done, status in ((2, "done"), (2, "skipped")):
        report = lowtide.upscale(tmp_path, tmp_path, suffix="_x2", budget=BUDGET)
        names = [Path(image.output).relative_to(tmp_path).as_posix() for image in report.images]
        assert names == ["deep/b_x2.png", "photo_x2.png"]
        assert statuses(report) == [status] * done
    assert [one.reason for one in report.skipped_inputs] == [
        "by its name an output of b.png",
        "by its name an output of photo.png",
    ]
    # What comes out is the same, and so a file that has it already is not made again.
    settings = UpscaleSettings.of(), UpscaleSettings.of(suffix="_x2")
    assert len({one.content_hash("model", "fp32") for one in settings}) == 1


def test_a_folder_says_what_it_leaves_out(source, tmp_path):
    folder = tmp_path / "in"
    (folder / ".git").mkdir(parents=True)
    (folder / "photo.png").write_bytes(source.read_bytes())
    (folder / "unnamed").write_bytes(source.read_bytes())
    (folder / "a.nef").write_bytes(b"II*\0")
    (folder / "notes.txt").write_text("to be sorted\n")
    for run in (lowtide.plan, lowtide.upscale):
        report = run(folder, tmp_path / "out", budget=BUDGET)
        assert len(report.images) == 1
        assert {Path(one.path).name: one.reason for one in report.skipped_inputs} == {
            ".git": "hidden",
            "a.nef": "camera RAW, needs developing first",
            "notes.txt": "a text file",
            "unnamed": "PNG by its content, but not by its name",
        }


def test_nothing_is_overwritten_without_force(run, read, tmp_path):
    target = tmp_path / "out.png"
    target.write_text("precious")
    with pytest.raises(UsageError, match="already exists"):
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
    assert kept["schema_version"] == 2
    assert kept["model"]["name"] == "lowtide-x2"
    assert kept["image"] == image.model_dump(mode="json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.png",
        "out.png.lowtide.json",
        "photo.png",
    ]


def test_a_model_may_be_a_path(run, tmp_path):
    from lowtide.models.bundled import find_bundled

    (tmp_path / "mine.safetensors").write_bytes(find_bundled("lowtide-x2").path.read_bytes())
    assert run(model=tmp_path / "mine.safetensors").status == "done"
    with pytest.raises(ModelError, match="no such file"):
        run("b.png", model=tmp_path / "other.safetensors")


@pytest.mark.parametrize("name", ["out.png", "out.webp"])
def test_color_under_an_alpha_of_0_everywhere_is_kept(
    tmp_path, save, read, crop, expected, run, name
):
    """Such a file holds color for something else, or its alpha by mistake."""
    clear = np.concatenate([crop, np.zeros_like(crop[..., :1])], axis=2)
    image = run(name, save(tmp_path / "in.png", clear))
    result = read(tmp_path / name)
    assert not result[..., 3].any()
    difference = np.abs(result[..., :3].astype(int) - expected(crop)).mean()
    assert difference < (0.1 if name == "out.png" else 3)
    assert "alpha is 0 everywhere" in image.notes[0]


def test_color_under_alpha_of_0_survives_bands_and_resizing(
    tmp_path, save, read, crop, expected, run
):
    clear = np.concatenate([crop, np.zeros_like(crop[..., :1])], axis=2)
    source = save(tmp_path / "in.tif", clear)
    run("bands.png", source, strategy="streamed")
    whole = expected(crop).astype(int)
    assert np.abs(read(tmp_path / "bands.png")[..., :3] - whole).max() <= 1
    run("same.png", source, scale=1.0)
    small = read(tmp_path / "same.png")
    assert np.abs(small[..., :3].astype(int) - crop).mean() < 5
    assert not small[..., 3].any()


def test_arrays_are_no_inputs(tmp_path):
    for inputs in (np.zeros((2, 4, 3), np.uint8), [np.zeros((2, 4, 3))]):
        for run in (lowtide.upscale, lowtide.plan, lowtide.denoise):
            with pytest.raises(UsageError, match="names of files") as refused:
                run(inputs, tmp_path / "out.png")
            assert "lowtide.load" in refused.value.hint
