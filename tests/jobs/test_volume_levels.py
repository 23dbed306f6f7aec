"""Noise levels estimated from volumes: of coarse structure, with and neither a background."""

import numpy as np
import pytest

from lowtide.jobs.denoise.volumes.levels import estimate_levels
from lowtide.jobs.denoise.volumes.survey import survey_ranges, survey_volume
from lowtide.media.volume_header import inspect_volume
from lowtide.models.denoiser.noise_models import RicianNoise
from support.nifti_files import nifti

STD = 15.0


def coarse(size=96, slices=6, volumes=1, cell=3):
    """A head of cells of 3 × 3 voxels, 300 to 900 bright, in a background of 0."""
    cells = np.random.default_rng(7).uniform(300, 900, (size // cell, size // cell, slices))
    tissue = cells.repeat(cell, 0).repeat(cell, 1)
    x, y = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    head = tissue * (np.hypot(x - size / 2, y - size / 2) < 0.35 * size)[..., None]
    decay = 1 - 0.1 * np.arange(volumes) / max(1, volumes - 1)
    return (head[..., None] * decay).astype(np.float32)


def noisy(clean, std=STD, seed=0):
    return RicianNoise(std=std).sample(clean, np.random.default_rng(seed))


def levels_of(path, values):
    facts = inspect_volume(nifti(path, values.astype(np.float32)))
    return estimate_levels(facts, survey_ranges(facts))


@pytest.mark.parametrize("std", [2, 10, 20])
@pytest.mark.parametrize("kind", ["float32", "int16"])
def test_the_background_tells_the_noise_of_a_coarse_volume(tmp_path, std, kind):
    found = levels_of(tmp_path / "in.nii", np.rint(noisy(coarse(), std)).astype(kind))
    assert found.levels == pytest.approx((std,), rel=0.15 if std < 3 else 0.1)  # of rounding
    (note,) = found.notes
    assert "the background" in note and "taken for structure" in note


@pytest.mark.parametrize("volumes", [2, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_other_volumes_tell_the_noise_of_a_coarse_series(tmp_path, volumes, masked):
    clean = coarse(volumes=volumes)
    values = noisy(clean) * (clean > 0 if masked else 1)
    found = levels_of(tmp_path / "in.nii", values)
    assert found.levels == pytest.approx([STD] * volumes, rel=0.1)
    assert "volumes next to each other" in found.notes[0]


def test_volumes_that_do_not_predict_each_other_have_a_note(tmp_path):
    """Another head in each volume: the level is that of slices, and the background another."""
    heads = [coarse()[::step] for step in (1, -1)]
    found = levels_of(tmp_path / "in.nii", noisy(np.concatenate(heads, 3), 10))
    assert min(level or 0 for level in found.levels) > 15
    assert any("structure that they do not share" in note for note in found.notes)


def test_flat_parts_tell_the_noise_of_a_masked_volume(tmp_path):
    """Where two thirds of the tissue are coarse, and one is smooth."""
    clean = coarse()
    third = np.s_[:44]
    clean[third] = np.where(clean[third] > 0, 700, 0)
    found = levels_of(tmp_path / "in.nii", noisy(clean) * (clean > 0))
    assert found.levels == pytest.approx((STD,), rel=0.2)
    assert "structure as fine as voxels counts too" in found.notes[0]


def test_a_masked_coarse_volume_alone_is_said_to_be_uncertain(tmp_path):
    """Nothing in it tells structure from noise; the report says what to do."""
    clean = coarse()
    path = nifti(tmp_path / "in.nii", noisy(clean) * (clean > 0))
    survey = survey_volume(inspect_volume(path), None, None, 0.25)
    assert (survey.levels[0] or 0) > STD and any("lower --sigma" in note for note in survey.notes)


def test_smooth_volumes_are_right_in_every_way(tmp_path):
    clean = np.where(coarse(volumes=3) > 0, 700, 0).astype(np.float32)
    inside = clean > 0
    for masked in (False, True):
        values = noisy(clean) * (inside if masked else 1)
        for volumes in (1, 3):
            found = levels_of(tmp_path / "in.nii", values[..., :volumes])
            assert found.levels == pytest.approx([STD] * volumes, rel=0.1)
            assert len(found.notes) == (masked and volumes == 1)


def test_white_noise_alone_is_its_own_level(tmp_path):
    values = 1000 + np.random.default_rng(0).normal(0, 20, (90, 90, 8, 1))
    assert levels_of(tmp_path / "in.nii", values).levels == pytest.approx((20,), rel=0.03)


@pytest.mark.parametrize("weak", [0.3, 0.6])
def test_a_background_that_was_interpolated_counts(tmp_path, weak):
    """Averages of neighbors keep the mean of magnitudes, and have less noise, as in tissue."""
    values = noisy(coarse())
    values = (1 - weak / 2) * values + weak / 2 * np.roll(values, 1, 0)
    left = np.hypot(1 - weak / 2, weak / 2) * STD
    assert levels_of(tmp_path / "in.nii", values).levels == pytest.approx((left,), rel=0.2)


def test_dark_tissue_is_no_background(tmp_path):
    """Masked, with a dark half as uneven as the noise of magnitudes would be, but stronger."""
    clean = np.where(coarse() > 0, 900, 0).astype(np.float32)
    dark = np.s_[:, 48:]
    uneven = 60 * np.random.default_rng(1).rayleigh(1, clean[dark].shape)
    mask = clean > 0
    clean[dark] = uneven
    found = levels_of(tmp_path / "in.nii", noisy(clean, 10) * mask)
    assert found.levels == pytest.approx((10,), rel=0.2)
    assert "neither a background" in found.notes[0]


def test_copies_of_one_volume_are_not_without_noise(tmp_path):
    values = np.repeat(noisy(coarse()), 3, 3)
    found = levels_of(tmp_path / "in.nii", values)
    assert found.levels == pytest.approx([STD] * 3, rel=0.1) and "the background" in found.notes[0]


def test_voxels_that_are_not_finite_change_nothing(tmp_path):
    values = noisy(coarse())
    values[::9, ::7, 2] = np.nan
    values[5, :, 3] = np.inf
    assert levels_of(tmp_path / "in.nii", values).levels == pytest.approx((STD,), rel=0.1)


def test_values_below_0_have_no_background_of_magnitudes(tmp_path):
    values = coarse() + np.random.default_rng(0).normal(0, STD, coarse().shape)
    assert "neither a background" in levels_of(tmp_path / "in.nii", values).notes[0]
