"""Noise levels that `lowtide denoise` finds in pictures as cameras and editors write them."""

import numpy as np
import pytest
import pyvips

import lowtide


@pytest.fixture
def found(weights, tmp_path):
    """Plan to denoise an array, as PNG or as JPEG of a quality; returns the report."""

    def run(array, quality=None, **options):
        path = tmp_path / ("in.png" if quality is None else "in.jpg")
        image = pyvips.Image.new_from_array(in_bytes(array))
        image.write_to_file(str(path), **({} if quality is None else {"Q": quality}))
        options = {"model": weights, "budget": "256MiB", "dry_run": True, **options}
        return lowtide.denoise(path, tmp_path / "out.png", **options).images[0]

    return run


def in_bytes(values):
    return np.rint(np.clip(values, 0, 255)).astype(np.uint8)


def white(shape, sigma, seed=0):
    return np.random.default_rng(seed).normal(0, sigma, shape)


def smooth(values, rounds=1):
    """Values after filters [1 2 1] / 4 along both axes."""
    for axis in (0, 1) * rounds:
        values = (np.roll(values, 1, axis) + 2 * values + np.roll(values, -1, axis)) / 4
    return values


def blotches(shape, sigma, rounds):
    noise = smooth(white(shape, 1), rounds)
    return noise * (sigma / noise.std())


def demosaiced(picture, sigma):
    """The picture from an RGGB mosaic with noise, each color interpolated between its places."""
    mosaic = np.zeros(picture.shape)
    for top, left, color in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 2)):
        mosaic[top::2, left::2, color] = picture[top::2, left::2, color]
    places = mosaic != 0
    mosaic += places * white(picture.shape[:2], sigma)[..., None]
    return smooth(mosaic) / np.maximum(smooth(places.astype(float)), 1e-9)


def test_white_noise_is_found_as_strong_as_it_was_before_clipping(found, photo):
    dark = photo // 3
    for picture, sigma, within in ((photo, 10, 0.1), (photo, 25, 0.04), (photo, 50, 0.03)):
        report = found(picture + white(picture.shape, sigma))
        assert report.sigma == pytest.approx(sigma, rel=within) and not report.shared_by_neighbors
    assert found(dark + white(dark.shape, 50)).sigma == pytest.approx(50, rel=0.04)


def test_noise_that_neighbors_share_is_found_at_its_level(found, photo):
    """The finest octave of these has a tenth to a half of it."""
    smoothed = photo + blotches(photo.shape, 20, 2)
    coarse = photo + blotches(photo.shape, 20, 8)
    for name, report, level in (
        ("demosaiced", found(demosaiced(photo, 20)), 17),
        ("smoothed", found(smoothed), 20),
        ("coarse", found(coarse), 20),
        ("JPEG", found(photo + white(photo.shape, 25), quality=60), 16),
        ("both", found(demosaiced(photo, 20), quality=85), 12),
    ):
        assert report.shared_by_neighbors, name
        assert 0.8 < report.sigma / level < 1.8, (name, report.sigma)
        assert name in ("JPEG", "both") or not report.notes, name
        assert "neighbors share it" in dict(report.details())["noise"], name


def test_pictures_without_noise_stay_nearly_as_they_are(found, photo):
    half = (photo[::2, ::2].astype(float) + photo[1::2, 1::2]) / 2
    for picture in (photo, half, photo[..., 1:2]):
        for quality in (None, 95, 75):
            assert found(picture, quality).sigma < 2.3  # 48 dB


def test_what_octaves_leave_open_is_said(found, photo):
    """Coarse noise without color, which texture is too, and a model that sees white noise."""
    plain = np.full((256, 320, 1), 120.0)
    gray = plain + blotches(plain.shape, 12, 2)
    textured = gray.copy()
    textured[:, :32] = plain[:, :32] + white((256, 32, 1), 1)
    for picture in (gray, textured):
        report = found(picture)
        (note,) = report.notes
        assert report.sigma < 6 and "taken for texture" in note and "--sigma" in note
    report = found(gray, quality=90)
    (note,) = report.notes
    assert report.sigma > 9 and "in brightness alone" in note
    report = found(demosaiced(photo, 20), noise="poisson-gaussian", model=None)
    assert any("without that option it is removed" in one for one in report.notes)


def test_texture_in_a_jpeg_is_kept_as_far_as_its_tables_tell_it_from_noise(found):
    """Noise of brightness alone is what coding left, where it may have removed that of colors."""
    grain = blotches((256, 256, 1), 14, 2) + 120
    fine_tables, coarse_tables = (found(np.repeat(grain, 3, 2), q) for q in (97, 60))
    assert fine_tables.sigma < 6 < 9 < coarse_tables.sigma
    steep = blotches((256, 256, 1), 14, 2) + blotches((256, 256, 1), 40, 20) + 120
    assert found(np.repeat(steep, 3, 2), quality=60).sigma < 6


def test_a_level_that_is_given_has_the_kind_that_is_found(found, photo):
    model = {"model": None}
    estimated = found(demosaiced(photo, 20), **model)
    given = found(demosaiced(photo, 20), sigma=10, **model)
    assert given.sigma == 10 and given.shared_by_neighbors
    assert given.noise_parameters == estimated.noise_parameters
    assert given.noise_parameters[0] < 0.6 < 1 < given.noise_parameters[2]
    assert "given; neighbors share it" in dict(given.details())["noise"]
    plain = found(photo + white(photo.shape, 20), sigma=10, **model)
    assert plain.noise_parameters == (1,) * 6 and not plain.shared_by_neighbors


def test_large_pictures_are_estimated_from_a_part_of_them(found, photo):
    large = np.tile(photo, (8, 6, 1))
    sigma = found(large + white(large.shape, 15)).sigma
    assert sigma == pytest.approx(15, rel=0.05)
