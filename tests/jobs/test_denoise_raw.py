"""`lowtide denoise` of camera RAW files, from the mosaic to the developed picture."""

import json

import numpy as np
import pytest

import lowtide
from lowtide import BudgetError, ImageError, UsageError
from lowtide.models.denoiser.variance import VarianceStabilizer
from support.denoiser_files import denoiser_file
from support.image_folders import files_of, statuses
from support.raw_files import BAYER, XTRANS, exposed, linear_light, mosaic_of, write_dng

pytest.importorskip("rawpy")

GAIN, READ = 8.0, 6.0


@pytest.fixture(scope="module")
def light(photo):
    """Linear values of a piece of the photograph, (60, 84, 3), as a sensor without balance."""
    return linear_light(photo[100:160, 200:284]) * [0.5, 1, 0.65]


@pytest.fixture
def noisy(light):
    """Levels of its mosaic with shot and read noise."""
    return exposed(mosaic_of(light, BAYER["RGGB"]) * 0.3, GAIN, READ)


@pytest.fixture
def denoise(weights, tmp_path, read):
    """Denoise levels, by default to a mosaic; returns the result and its report."""

    def run(levels, pattern=BAYER["RGGB"], name="out.tif", dng=None, **options):
        source = write_dng(tmp_path / "in.dng", levels, pattern, **(dng or {}))
        chosen = {"model": weights, "budget": "256MiB", "force": True, "raw_output": "mosaic"}
        report = lowtide.denoise(source, tmp_path / name, **{**chosen, **options})
        return read(tmp_path / name), report.images[0]

    return run


@pytest.fixture
def table(tmp_path):
    """Write a table of `GAIN` and `READ` at some ISOs."""

    def write(*isos, gain=GAIN):
        parameters = {"gain": gain, "read": READ, "row": 0, "black": 64, "white": 4095}
        settings = [{"iso": iso, "parameters": parameters} for iso in isos]
        data = {"camera": "test", "noise_model": "raw-camera", "settings": settings}
        path = tmp_path / f"camera{len(isos)}.json"
        path.write_text(json.dumps(data))
        return path

    return write


def db(levels, clean):
    """PSNR in dB of levels against a clean mosaic in 0..1, up to its brightest value."""
    truth = clean * 4031 + 64
    error = np.mean((levels.squeeze() - truth) ** 2)
    return 10 * np.log10((clean.max() * 4031) ** 2 / error)


def test_the_transformed_noise_is_of_one_strength_and_its_inverse_unbiased():
    random = np.random.default_rng(0)
    for a, b in ((0.01, 0.02), (1e-4, 1e-3), (0.0, 0.02)):
        made = VarianceStabilizer(a, b, top=0.5)
        for value in (0.0, 0.01, 0.1, 0.5):
            photons = random.poisson(value / a, 200_000) * a if a else value
            values = made.forward(photons + b * random.standard_normal(200_000))
            sigma = np.sqrt(a * value + b**2)
            mean = values.mean(dtype=np.float64)
            assert values.std(dtype=np.float64) == pytest.approx(made.sigma, rel=0.12)
            assert made.inverse(np.float32(mean)) == pytest.approx(value, abs=0.03 * sigma)
        assert made.forward(np.float32(0.5)) == pytest.approx(1)
        assert made.value_at_sigma(made.sigma) == pytest.approx(0.5)


@pytest.mark.parametrize("pattern", [*BAYER.values(), XTRANS, None], ids=[*BAYER, "XT", "RGB"])
def test_without_noise_levels_are_copied(pattern, light, denoise):
    levels = np.rint((mosaic_of(light, pattern) if pattern else light) * 4031 + 64)
    result, report = denoise(levels, pattern, sigma=0)
    assert np.array_equal(result.squeeze(), levels)
    assert "without noise samples are copied" in report.notes and report.shot_noise is None


def test_saturated_files_are_copied(denoise):
    result, report = denoise(np.full((40, 50), 4095))
    assert (result == 4095).all() and report.sigma is None


@pytest.mark.parametrize("name", BAYER)
def test_each_phase_of_the_filter_is_denoised(name, photo, denoise, table):
    """With the bundled model, whose weights say how much."""
    clean = mosaic_of(linear_light(photo[100:260, 200:360]) * [0.5, 1, 0.65], BAYER[name]) * 0.1
    levels = exposed(clean, GAIN, READ)
    result, report = denoise(levels, BAYER[name], model=None, noise=table(800))
    assert db(result, clean) > db(levels, clean) + 4
    assert (report.colors, report.iso, report.black, report.white) == (name, 800, 64, 4095)
    assert report.shot_noise == pytest.approx(GAIN) and report.sigma_source == "table"
    assert report.read_noise == pytest.approx(READ, rel=0.01)  # with rounding
    assert report.memory.within_budget


def test_noise_is_estimated_from_the_planes(photo, denoise):
    """And of close pixels of one color, which texture adds less to."""
    clean = mosaic_of(linear_light(photo), BAYER["RGGB"]) * 0.05
    _, report = denoise(exposed(clean, GAIN, READ, seed=3))
    assert report.sigma_source == "estimated"
    assert abs(report.shot_noise - GAIN) < min(2 * report.shot_noise_error, 0.4 * GAIN)
    assert 0 < report.shot_noise_error < GAIN and 0 < report.read_noise_error < 2 * READ
    shown = dict(report.details())["noise"]
    assert shown.startswith("variance (") and shown.count(" ± ") == 2
    _, alone = denoise(np.random.default_rng(0).normal(500, 20, (60, 80)).round())
    assert alone.read_noise == pytest.approx(20, rel=0.15)


def test_estimating_the_noise_of_a_textured_file_costs_little(photo, denoise, table):
    """Beside a table, with the bundled model; every second pixel of the photograph is texture."""
    coarse = photo[: photo.shape[0] // 4 * 4 : 2, : photo.shape[1] // 4 * 4 : 2]
    for pattern in (BAYER["RGGB"], BAYER["GBRG"]):
        clean = mosaic_of(linear_light(coarse), pattern) * 0.6
        levels = exposed(clean, GAIN, READ)
        known, report = denoise(levels, pattern, model=None, noise=table(800))
        assert report.shot_noise_error is None
        estimated, report = denoise(levels, pattern, model=None)
        assert db(estimated, clean) > db(known, clean) - 0.5
        assert abs(report.shot_noise - GAIN) < 2 * report.shot_noise_error


@pytest.mark.parametrize("pattern", [BAYER["RGGB"], XTRANS])
def test_strength_mixes_levels_of_the_sensor(pattern, light, denoise):
    levels = exposed(mosaic_of(light, pattern) * 0.3, GAIN, READ)
    full, half, none = (denoise(levels, pattern, strength=one)[0].squeeze() for one in (1, 0.5, 0))
    assert np.array_equal(none, levels) and (full != levels).any()
    assert abs(half - (levels + full.astype(float)) / 2).max() <= 0.5


def test_every_noise_option_changes_the_result(noisy, denoise, table):
    results = {
        "estimated": denoise(noisy)[0],
        "sigma": denoise(noisy, sigma=12)[0],
        "table": denoise(noisy, noise=table(800))[0],
        "ISO": denoise(noisy, noise=table(100, 3200), iso=200)[0],
        "ddpm": denoise(noisy, sigma=12, steps=2, scheduler="ddpm")[0],
        "ddim": denoise(noisy, sigma=12, steps=2)[0],
        "black": denoise(noisy, sigma=12, black_level=60)[0],
    }
    different = {value.tobytes() for value in results.values()}
    assert len(different) == len(results) - 1  # the two tables say the same
    assert np.array_equal(results["table"], results["ISO"])


def test_streamed_equals_whole(noisy, denoise):
    whole, first = denoise(noisy, sigma=12, strategy="whole")
    bands, second = denoise(noisy, sigma=12, strategy="streamed")
    assert (first.plan.strategy.name, second.plan.strategy.name) == ("whole", "streamed")
    assert np.abs(whole.astype(int) - bands).max() <= 1


@pytest.mark.slow
def test_a_large_mosaic_keeps_a_budget_that_holds_no_whole_run(photo, denoise):
    rows = linear_light(np.tile(photo, (2, 2, 1))) * [0.5, 1, 0.65]
    levels = exposed(mosaic_of(rows, BAYER["RGGB"]) * 0.3, GAIN, READ)
    with pytest.raises(BudgetError):
        denoise(levels, sigma=12, budget="200MiB", strategy="whole")
    _, report = denoise(levels, sigma=12, budget="200MiB")
    assert report.plan.strategy.name == "streamed"
    assert report.memory.peak_bytes <= 200 << 20 and report.memory.within_budget


def test_tiles_are_compared_with_the_whole_file(noisy, denoise):
    _, report = denoise(noisy, sigma=12, tile=16, tile_overlap=8)
    assert report.accuracy.execution == "bounded" and report.accuracy.execution_error.tiles_sampled


def test_outputs_go_by_the_suffix(noisy, denoise):
    for name, dtype, written in (
        ("out.tif", np.uint16, "linear"),
        ("out.png", np.uint16, "developed"),
        ("out.jpg", np.uint8, "developed"),
    ):
        result, report = denoise(noisy, name=name, raw_output="auto", dng={"orientation": 6})
        assert result.dtype == dtype and result.shape == (84, 60, 3) and result.std() > 1
        assert report.written == written and (report.out_width, report.width) == (60, 84)


def test_a_sensor_without_colors_is_developed_gray(light, denoise):
    levels = exposed(light[..., 1] * 0.3, GAIN, READ)
    copied, report = denoise(levels, None, sigma=0)
    assert np.array_equal(copied.squeeze(), levels)
    assert (report.colors, report.black, report.white) == ("gray", 64, 4095)
    for name, dtype in (("out.tif", np.uint16), ("out.jpg", np.uint8)):
        result, report = denoise(levels, None, name=name, raw_output="auto", sigma=12)
        assert result.dtype == dtype and result.squeeze().shape == levels.shape
        assert result.std() > 1 and report.plan.image.network_inputs == 1


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_pixels_that_are_not_square_are_stretched(orientation, noisy, denoise):
    high, wide = noisy.shape
    for pixel, size in (((2, 1), (high, 2 * wide)), ((2, 3), (90, wide))):
        dng = {"pixel": pixel, "orientation": orientation}
        result, report = denoise(noisy, raw_output="linear", dng=dng)
        shown = size if orientation < 5 else size[::-1]
        assert result.shape == (*shown, 3)
        assert (report.out_height, report.out_width) == shown
        assert (report.width, report.height) == (wide, high)  # of the sensor


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_crop_of_the_camera_is_taken(orientation, noisy, denoise):
    """It is where the whole development has it, once both lie as the sensor."""
    turns = {1: 0, 3: 2, 6: 1, 8: 3}[orientation]
    options = {"raw_output": "linear", "sigma": 0}
    whole, _ = denoise(noisy, dng={"orientation": orientation}, **options)
    dng = {"orientation": orientation, "crop": (12, 8, 60, 40)}
    result, report = denoise(noisy, dng=dng, **options)
    lying, expected = (np.rot90(one, turns) for one in (result, whole))
    assert np.array_equal(lying, expected[8:48, 12:72])
    size, of = ("60×40", "84×60") if turns % 2 == 0 else ("40×60", "60×84")
    words = f"the camera's crop is taken: {size} of {of} pixels; --raw-output mosaic writes all"
    assert words in report.notes


@pytest.mark.parametrize("pattern", [BAYER["GRBG"], XTRANS, None], ids=["GRBG", "XT", "gray"])
def test_hot_pixels_are_mended_before(pattern, photo, denoise):
    light = linear_light(photo[100:220, 200:344]) * [0.5, 1, 0.65] * 0.3
    clean = mosaic_of(light, pattern) if pattern else light[..., 1]
    levels = exposed(clean, GAIN, READ)
    random = np.random.default_rng(3)
    y, x = random.integers(0, 120, 60), random.integers(0, 144, 60)
    hot = levels.copy()
    hot[y, x] = 4095
    kept, report = denoise(hot, pattern, sigma=0)
    assert (kept.squeeze()[y, x] == 4095).all() and "hot" not in " ".join(report.notes)
    mended, report = denoise(hot, pattern, sigma=0, hot_pixels=True)
    (note,) = [one for one in report.notes if "hot pixels were mended" in one]
    assert (mended.squeeze()[y, x] > 3000).mean() < 0.1
    assert int(note.split()[0]) == (mended.squeeze() != hot).sum()
    others = np.ones(hot.shape, bool)
    others[y, x] = False
    assert (mended.squeeze() != levels)[others].mean() < 1e-3
    _, first = denoise(levels, pattern)
    _, second = denoise(hot, pattern, hot_pixels=True)
    assert second.shot_noise == pytest.approx(first.shot_noise, rel=0.25)


def test_stars_are_no_hot_pixels(denoise):
    y, x = np.mgrid[:120, :140]
    sky = np.full(y.shape, 0.03)
    random = np.random.default_rng(4)
    for row, column in random.uniform(9, 110, (40, 2)):
        sky += 0.7 * np.exp(-((y - row) ** 2 + (x - column) ** 2) / 2)
    levels = exposed(sky.clip(0, 1), GAIN, READ)
    for pattern in (BAYER["RGGB"], None):
        result, report = denoise(levels, pattern, sigma=0, hot_pixels=True)
        assert np.array_equal(result.squeeze(), levels)
        assert "0 hot pixels were mended" in report.notes


def test_a_crop_that_is_not_taken_is_named(noisy, denoise):
    for crop, output, words in (
        ((12, 8, 60, 40), "mosaic", "60×40 pixels, is not taken: a mosaic is written whole"),
        ((2, 2, 8, 8), "linear", "8×8 pixels, is not taken: it leaves half a side or less"),
    ):
        result, report = denoise(noisy, dng={"crop": crop}, raw_output=output, sigma=0)
        assert result.shape[:2] == noisy.shape
        assert any(words in one for one in report.notes)
    _, report = denoise(noisy, dng={"crop": (0, 0, 84, 60)}, sigma=0)
    assert not any("crop" in one for one in report.notes)


def test_a_network_for_mosaics_gets_the_mosaic_at_its_phase(light, tmp_path, denoise):
    """The same mosaic, begun one pixel later, has the same values."""
    options = {"channels": 1, "cfa": "RGGB", "linear": True, "noise_model": "poisson-gaussian"}
    model = denoiser_file(tmp_path / "mosaic.safetensors", noise_parameters=1, **options)
    levels = exposed(mosaic_of(light, BAYER["RGGB"]), GAIN, READ)
    result, _ = denoise(levels, model=model, sigma=9)
    assert (result != levels[..., None]).any()
    shifted, report = denoise(levels[1:, 1:], BAYER["BGGR"], model=model, sigma=9)
    inner = np.abs(result[21:-20, 21:-20].astype(int) - shifted[20:-20, 20:-20])
    assert report.sigma == pytest.approx(255 * 9 / 4031, rel=0.01)
    assert np.median(inner) <= 60  # the norms see the other borders too
    with pytest.raises(UsageError, match="is for RGGB mosaics"):
        denoise(levels, XTRANS, model=model, sigma=9)


def test_a_dry_run_and_a_folder_that_is_resumed(noisy, weights, tmp_path):
    for name in ("a", "deep/b"):
        write_dng(tmp_path / "in" / f"{name}.dng", noisy)
    (tmp_path / "in" / "deep" / "c.dng").write_bytes(b"II*\0 broken")
    given, options = (tmp_path / "in", tmp_path / "out"), {"model": weights, "budget": "256MiB"}
    planned = lowtide.denoise(*given, dry_run=True, **options)
    assert statuses(planned) == ["planned", "planned", "failed"]
    assert planned.images[0].read_noise > 0 and not (tmp_path / "out").exists()
    assert statuses(lowtide.denoise(*given, **options)) == ["done", "done", "failed"]
    assert sorted(files_of(tmp_path / "out")) == ["a.tif", "deep/b.tif"]
    again = lowtide.denoise(*given, **options)
    assert statuses(again) == ["skipped", "skipped", "failed"]
    other = lowtide.denoise(*given, raw_output="mosaic", **options)
    assert "--force to replace it" in (other.images[0].hint or "")


REFUSED = [
    ({"noise": "TABLES", "dng": {"iso": None}}, UsageError, "in.dng: .*no ISO is given", "--iso N"),
    ({"noise": "TABLES", "dng": {"iso": 6400}}, UsageError, "ISO 6400 is outside", "--iso N"),
    ({"dng": {"black": 240}}, ImageError, "black level is 240, and the darkest", "--black-level"),
    ({"raw_output": "linear", "name": "out.jpg"}, UsageError, "does not hold the 16 bits", "tif"),
    ({"kind": "image", "raw_output": "auto"}, ImageError, "this is a camera RAW file", "darktable"),
    ({"noise": "RICIAN"}, UsageError, "rician noise is not that of a sensor", "--flat"),
    ({"budget": "8MiB"}, BudgetError, "the smallest", "--budget"),
]


@pytest.mark.parametrize(("options", "error", "words", "hint"), REFUSED)
def test_what_cannot_be_right_is_refused(
    options, error, words, hint, noisy, denoise, table, tmp_path
):
    given = dict(options)
    if given.get("noise") == "TABLES":
        given["noise"] = table(100, 3200)
    if given.get("noise") == "RICIAN":
        settings = [{"iso": None, "parameters": {"std": 0.2}}]
        data = {"camera": "mri", "noise_model": "rician", "settings": settings}
        given["noise"] = tmp_path / "rician.json"
        given["noise"].write_text(json.dumps(data))
    before = files_of(tmp_path)
    with pytest.raises(error, match=words) as caught:
        denoise(noisy, **given)
    assert hint in (caught.value.hint or "")
    assert set(files_of(tmp_path)) - set(before) <= {"in.dng"}


def test_an_all_black_development_leaves_nothing_behind(denoise, tmp_path):
    with pytest.raises(ImageError, match="the development is all black") as caught:
        denoise(np.full((40, 50), 64), sigma=0, raw_output="linear")
    assert "--raw-output mosaic" in (caught.value.hint or "")
    assert list(files_of(tmp_path)) == ["in.dng"]


def test_inputs_of_several_kinds_are_refused_with_their_counts(noisy, weights, tmp_path, save):
    write_dng(tmp_path / "in" / "a.dng", noisy)
    write_dng(tmp_path / "in" / "b.dng", noisy)
    save(tmp_path / "in" / "a.jpg", np.zeros((9, 9, 3), np.uint8))
    given = (tmp_path / "in", tmp_path / "out")
    with pytest.raises(UsageError, match="1 images and 2 camera RAW files") as caught:
        lowtide.denoise(*given, model=weights)
    assert caught.value.hint == "--kind image or --kind raw"
    options = {"model": weights, "budget": "256MiB", "dry_run": True}
    assert len(lowtide.denoise(*given, kind="raw", **options).images) == 2
    assert len(lowtide.denoise(*given, kind="image", sigma=9, **options).images) == 1
    for option in ({"black_level": 64}, {"raw_output": "linear"}, {"hot_pixels": True}):
        with pytest.raises(UsageError, match="is for camera RAW files"):
            lowtide.denoise(*given, kind="image", **option, **options)
    with pytest.raises(UsageError, match="--sigma 300 is more than the 255 levels"):
        lowtide.denoise(*given, kind="image", sigma=300, **options)
