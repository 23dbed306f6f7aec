"""Values that are not what their sample type makes of them: 12 bits in 16, floats of any range."""

import numpy as np
import pytest
import tifffile

import lowtide
from lowtide.jobs.images.value_range import ValueRangeScale
from lowtide.media.image_info import ValueRange

BUDGET = "256MiB"


@pytest.fixture
def run(tmp_path, weights):
    """Write an array as TIFF and run a job on it; returns what the result holds, and its report."""

    def job(function, array, **options):
        kind = "rgb" if array.ndim == 3 else "minisblack"
        tifffile.imwrite(tmp_path / "in.tif", array, photometric=kind)
        options = {"budget": BUDGET, "force": True, **options}
        if function is lowtide.denoise:
            options = {"model": weights, **options}
        report = function(tmp_path / "in.tif", tmp_path / "out.tif", **options)
        return tifffile.imread(tmp_path / "out.tif"), report.images[0]

    return job


@pytest.fixture(scope="module")
def noisy(photo):
    """A piece of the photograph with noise, (60, 72, 3) in 0..1."""
    noise = np.random.default_rng(0).normal(0, 0.08, (60, 72, 3))
    return (photo[100:160, 200:272] / 255 + noise).clip(0, 1)


@pytest.mark.parametrize("function", [lowtide.upscale, lowtide.denoise])
@pytest.mark.parametrize("bits", [8, 10, 12, 14])
def test_fewer_bits_in_sixteen_are_scaled_by_their_white(function, bits, noisy, run):
    white = (1 << bits) - 1
    full, plain = run(function, np.rint(noisy * 65535).astype(np.uint16))
    result, report = run(function, np.rint(noisy * white).astype(np.uint16))
    assert result.max() <= white
    assert np.abs(result / white - full / 65535).max() < 1.5 / white + 0.01
    (note,) = [one for one in report.notes if "white is taken" in one]
    assert f"white is taken as {white:,}, that of {bits} bits" in note
    assert not any("white" in one for one in plain.notes)
    if function is lowtide.denoise:
        assert report.sigma == pytest.approx(plain.sigma, rel=0.02)


def test_eight_bits_of_a_file_are_those_of_its_white(noisy, tmp_path, save, read):
    source = save(tmp_path / "in.tif", np.rint(noisy * 4095).astype(np.uint16))
    other = save(tmp_path / "in.png", np.rint(noisy * 255).astype(np.uint8))
    results = []
    for given in (source, other):
        lowtide.upscale(given, tmp_path / "out.jpg", budget=BUDGET, force=True)
        results.append(read(tmp_path / "out.jpg").astype(float))
    assert np.abs(results[0] - results[1]).mean() < 3


@pytest.mark.parametrize("function", [lowtide.upscale, lowtide.denoise])
@pytest.mark.parametrize(("gain", "offset"), [(255, 0), (1e-3, 0), (2, -1), (1e5, 900)])
def test_floats_of_any_range_come_back_in_it(function, gain, offset, noisy, run):
    unit, _ = run(function, noisy.astype(np.float32))
    result, report = run(function, (noisy * gain + offset).astype(np.float32))
    assert np.abs((result - offset) / gain - unit).mean() < 0.01
    assert any("is taken as black" in one for one in report.notes)


def test_what_is_beyond_white_and_below_black_is_kept(run):
    random = np.random.default_rng(1)
    values = (0.3 + 0.05 * random.standard_normal((64, 64))).astype(np.float32)
    values[10, 10], values[30, 40], values[50, 20] = 40, -3, np.nan
    result, report = run(lowtide.denoise, values, sigma=12)
    assert result[10, 10] == pytest.approx(40, abs=1) and result[30, 40] == pytest.approx(-3, abs=1)
    assert np.isnan(result[50, 20]) and np.isfinite(result).sum() == result.size - 1
    assert any("from -3 to 40: 1 is taken as white" in one for one in report.notes)
    assert "1 samples are NaN or infinite, and are kept" in report.notes
    larger, _ = run(lowtide.upscale, values)
    assert np.isnan(larger[100:102, 40:42]).all() and np.isnan(larger).sum() == 4
    assert np.nanmax(larger) > 20 and np.nanmin(larger) < -1
    assert np.abs(np.nanmedian(larger) - 0.3) < 0.02


def test_several_steps_keep_it_too(run):
    random = np.random.default_rng(1)
    values = (0.3 + 0.05 * random.standard_normal((40, 48))).astype(np.float32)
    values[10, 10], values[30, 40] = 40, np.inf
    result, _ = run(lowtide.denoise, values, sigma=12, steps=2)
    assert result[10, 10] == pytest.approx(40, abs=2) and np.isinf(result[30, 40])


def test_tiles_equal_the_whole_where_values_are_missing(run, noisy):
    values = (noisy * 5 - 1).astype(np.float32)
    values[20:24, 30] = np.nan
    whole, _ = run(lowtide.upscale, values, strategy="whole")
    tiles, report = run(lowtide.upscale, values, tile=32)
    assert report.plan.strategy.tiles > 1
    np.testing.assert_allclose(tiles, whole, atol=1e-4)


def test_faint_noise_below_bright_stars_is_removed(run):
    """With the bundled model; white is not the brightest star."""
    random = np.random.default_rng(2)
    y, x = np.mgrid[:96, :96]
    sky = np.full((96, 96), 0.02)
    for row, column in random.integers(8, 88, (12, 2)):
        sky += 300 * np.exp(-((y - row) ** 2 + (x - column) ** 2) / 2)
    values = (sky + 0.004 * random.standard_normal(sky.shape)).astype(np.float32)
    result, _ = run(lowtide.denoise, values, model=None)
    dark = sky < 0.021
    assert (result - sky)[dark].std() < 0.5 * (values - sky)[dark].std()
    assert result.max() == pytest.approx(values.max(), rel=1e-3)


@pytest.mark.parametrize("ends", [(0, 40), (-2, 1), (-2, 40), (-0.1, 1.1), (0, 1)])
def test_what_is_compressed_is_expanded_again(ends):
    scale = ValueRangeScale(ValueRange(0, 1, *ends))
    unit = np.linspace(ends[0], ends[1], 500, dtype=np.float32)
    made = scale.compressed(unit)
    assert made.min() == pytest.approx(0, abs=1e-6) and made.max() == pytest.approx(1)
    assert (np.diff(made) > 0).all()
    np.testing.assert_allclose(scale.expanded(made), unit, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compression", ["none", "deflate"])
def test_float_results_have_no_predictor(compression, noisy, run, tmp_path):
    """Plain tifffile knows none of floats."""
    run(lowtide.upscale, noisy.astype(np.float32), tiff_compression=compression)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert file.pages.first.predictor == 1
