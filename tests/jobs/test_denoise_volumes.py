"""`lowtide denoise` on NIfTI files: geometry, steps of the scaling, levels, scores, bad input."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest

import lowtide
from lowtide import ImageError, InputError, LowtideError, UsageError
from lowtide.jobs.denoise.volumes.levels import brightest_maximum
from lowtide.jobs.denoise.volumes.survey import survey_ranges
from lowtide.media.volume_header import inspect_volume
from lowtide.models.denoiser.noise_models import RicianNoise
from lowtide.models.denoiser.noise_table import NoiseSetting, NoiseTable
from support.nifti_files import brain, nifti

SHAPE = (23, 19, 3, 4)


@pytest.fixture
def denoise(weights, tmp_path):
    """Denoise a file with the small network; returns the result and its report."""

    def run(path, name="out.nii.gz", **options):
        options = {"model": weights, "budget": "256MiB", "force": True, **options}
        report = lowtide.denoise(path, tmp_path / name, **options)
        result = nibabel.load(tmp_path / name)
        result.get_fdata()  # keeps them, since the file may be written again
        return result, report.images[0]

    return run


def noisy_series(shape=SHAPE, std=50.0, seed=0):
    return RicianNoise(std=std).sample(brain(shape), np.random.default_rng(seed))


def gradients(path, count):
    np.savetxt(path.with_name("in.bval"), [np.arange(count) * 500], fmt="%d")
    np.savetxt(path.with_name("in.bvec"), np.eye(3)[np.arange(count) % 3].T)


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("int16", {"scaling": (0.5, 10.0), "extension": b"kept"}),
        ("uint16", {"order": ">", "version": 2}),
        ("float32", {"order": ">"}),
    ],
)
def test_geometry_and_gradients_are_kept(denoise, tmp_path, dtype, more):
    slope, inter = more.get("scaling", (1, 0))
    stored = ((noisy_series() - inter) / slope).astype(dtype)
    path = nifti(tmp_path / "in.nii.gz", stored, **more)
    gradients(path, 4)
    result, report = denoise(path, sigma=50)
    before = nibabel.load(path)
    assert result.header.binaryblock == before.header.binaryblock
    assert result.header.extensions == before.header.extensions
    assert np.array_equal(result.affine, before.affine)
    assert result.shape == SHAPE and (result.get_fdata() != before.get_fdata()).mean() > 0.5
    for suffix in (".bval", ".bvec"):
        one, other = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
        assert one.read_bytes() == other.read_bytes()
    assert report.gradients == [str(tmp_path / "out.bval"), str(tmp_path / "out.bvec")]
    assert report.shape == SHAPE and report.levels == [50] * 4
    assert (report.sigma, report.sigma_source, report.status) == (50, "given", "done")
    assert report.accuracy.execution == "exact" and report.memory.within_budget


def test_integers_are_the_results_of_floats_to_half_a_step(denoise, tmp_path):
    stored = np.rint(noisy_series()).astype(np.int16)
    exact, _ = denoise(nifti(tmp_path / "a.nii", stored.astype(np.float32)), sigma=40)
    rounded, _ = denoise(nifti(tmp_path / "b.nii", stored), sigma=40)
    assert np.abs(exact.get_fdata() - rounded.get_fdata()).max() <= 0.501


def test_strength_mixes_values_and_is_what_the_report_looks_at(denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", noisy_series().astype(np.float32))
    (full, one), (half, two), (none, _) = (
        denoise(path, sigma=40, strength=strength) for strength in (1, 0.5, 0)
    )
    full, half, none = (image.get_fdata() for image in (full, half, none))
    before = nibabel.load(path).get_fdata()
    assert np.array_equal(none, before)
    np.testing.assert_allclose(half, (before + full) / 2, atol=1e-3)
    assert two.residual.std == pytest.approx(one.residual.std / 2, rel=0.01)
    assert ("control", "strength 0.5") in two.details()


def test_a_slice_is_what_the_network_makes_of_it(denoise, weights, tmp_path):
    """Scaled by the robust range, padded, and scaled back."""
    import torch

    from lowtide.models.loaded_model import pad_to_rule

    values = np.abs(noisy_series((21, 17, 2, 1))) + 1  # no zeros, which would be a mask
    path = nifti(tmp_path / "in.nii", values.astype(np.float32))
    result, _ = denoise(path, sigma=60)
    (one,) = survey_ranges(inspect_volume(path))
    model = lowtide.load(weights)
    model.module.set_level(60 / one.span)
    for place in range(2):
        unit = torch.from_numpy((values[:, :, place, 0].T - one.low) / one.span).float()
        padded = pad_to_rule(unit.expand(1, 3, -1, -1), model.descriptor.size)
        made = model.module(padded)[0, :, :17, :21].mean(0).numpy() * one.span + one.low
        made = made.clip(0, values.max())
        np.testing.assert_allclose(result.get_fdata()[:, :, place, 0].T, made, atol=0.02)


def test_levels_are_estimated_and_structure_gives_no_volume_more_than_the_median(denoise, tmp_path):
    clean = np.full((40, 40, 3, 5), 1000.0)
    clean[..., 0] += 300 * np.random.default_rng(3).standard_normal((40, 40, 3))  # structure
    values = clean + np.random.default_rng(4).normal(0, 30, clean.shape)
    _, report = denoise(nifti(tmp_path / "in.nii", values.astype(np.float32)))
    assert report.sigma_source == "estimated"
    assert report.levels == pytest.approx([30] * 5, rel=0.1)


def table(path: Path, std: float, model: str = "rician") -> Path:
    setting = NoiseSetting(iso=None, parameters={"std": std})
    NoiseTable(camera="test", noise_model=model, settings=(setting,)).save(path)
    return path


def test_a_table_gives_the_level_in_units_of_the_brightest_volume(denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", noisy_series(std=100))
    scale = brightest_maximum(survey_ranges(inspect_volume(path)))
    results = {}
    for model in ("rician", "gaussian"):
        noise = table(tmp_path / f"{model}.json", 100 / scale, model)
        result, report = denoise(path, noise=noise)
        assert report.sigma_source == "table" and report.noise.startswith(f"{model} of")
        assert report.levels == pytest.approx([100] * 4, rel=1e-5)
        results[model] = result.get_fdata()
    given, _ = denoise(path, sigma=100)
    np.testing.assert_allclose(results["gaussian"], given.get_fdata(), atol=0.05)
    assert results["rician"].min() >= 0 and not np.allclose(results["rician"], given.get_fdata())


def test_ratios_of_volumes_are_kept(denoise, tmp_path):
    """A volume five times as bright does not change what becomes of the others."""
    values = noisy_series()
    alone, _ = denoise(nifti(tmp_path / "a.nii", values), sigma=40)
    values = values.copy()
    values[..., 0] *= 5
    brighter, _ = denoise(nifti(tmp_path / "b.nii", values), sigma=40)
    one, other = alone.get_fdata()[..., 1:], brighter.get_fdata()[..., 1:]
    np.testing.assert_allclose(one, other, atol=1e-3)


def test_voxels_that_are_not_finite_are_kept_and_poison_nothing(denoise, tmp_path):
    values = noisy_series()
    plain, _ = denoise(nifti(tmp_path / "a.nii", values), sigma=50)
    holes = (5, 6, 1, 1), (11, 12, 1, 1), (0, 0, 0, 0)
    for place, value in zip(holes, (np.nan, np.inf, -np.inf), strict=True):
        values[place] = value
    values[:, :, 2, 3] = np.nan
    result, report = denoise(nifti(tmp_path / "b.nii", values), sigma=50)
    made = result.get_fdata()
    np.testing.assert_array_equal(np.isfinite(made), np.isfinite(values))
    np.testing.assert_array_equal(made[~np.isfinite(values)], values[~np.isfinite(values)])
    assert report.not_finite == 3 + 23 * 19 and any("NaN" in one for one in report.notes)
    np.testing.assert_allclose(made[..., 2], plain.get_fdata()[..., 2], atol=1e-3)


@pytest.mark.parametrize("value", [1e10, -1e10, 1e30, 3e38])
def test_a_huge_voxel_is_as_an_infinite_one(denoise, tmp_path, value):
    values, place = noisy_series(), (11, 12, 1, 1)
    results = []
    for given in (np.copysign(np.inf, value), value):
        values[place] = given
        result, report = denoise(nifti(tmp_path / "in.nii", values))
        results.append((result.get_fdata(), report.levels, report.notes))
        assert results[-1][0][place] == np.float32(given)
        assert report.not_finite == 1
    infinite, huge = results
    assert infinite[1:] == huge[1:]
    infinite[0][place] = huge[0][place]
    np.testing.assert_array_equal(infinite[0], huge[0])
    assert not np.array_equal(huge[0], values)


def test_values_of_no_scanner_are_refused(denoise, tmp_path):
    values = noisy_series()
    with pytest.raises(InputError, match="too small to compute with"):
        denoise(nifti(tmp_path / "small.nii", (values * 1e-40).astype(np.float32)))
    with pytest.raises(InputError, match="no voxel is finite"):
        denoise(nifti(tmp_path / "large.nii", (values + 10).astype(np.float64) * 1e200))


@pytest.mark.parametrize("sigma", [1e9, 1e300])
def test_more_noise_than_a_volume_spans_is_refused(denoise, tmp_path, sigma):
    path = nifti(tmp_path / "in.nii", noisy_series().astype(np.int16))
    with pytest.raises(UsageError, match=r"--sigma .* is more than all values of"):
        denoise(path, sigma=sigma)


def test_outside_of_a_mask_stays_zero(denoise, tmp_path):
    values = noisy_series() * (brain(SHAPE) > 0)
    result, _ = denoise(nifti(tmp_path / "in.nii", values.astype(np.float32)), sigma=50)
    outside = brain(SHAPE)[:, :, 0, 0] == 0
    assert not result.get_fdata()[outside].any()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
def test_without_noise_the_file_is_the_same(denoise, tmp_path, dtype):
    flat = np.full(SHAPE, 100, dtype)
    flat[8:] = 20
    for values, options in ((flat, {}), (np.full(SHAPE, 7, dtype), {}), (flat, {"sigma": 0})):
        path = nifti(tmp_path / "in.nii", values, scaling=(0.5, 1))
        _, report = denoise(path, "out.nii", **options)
        assert (tmp_path / "out.nii").read_bytes() == path.read_bytes()
        assert report.notes and report.residual is None


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (2, 3), (3, 3), (5, 4), (7, 7)])
def test_tiny_slices(denoise, tmp_path, size):
    values = np.rint(np.random.default_rng(0).normal(1000, 50, (*size, 3, 2))).astype(np.int16)
    path = nifti(tmp_path / "in.nii.gz", values)
    result, report = denoise(path)
    assert result.shape == values.shape and np.isfinite(result.get_fdata()).all()
    if min(size) < 3:
        assert report.sigma is None and any("--sigma" in one for one in report.notes)
        assert np.array_equal(result.get_fdata(), values)
    result, _ = denoise(path, sigma=50)
    assert min(size) < 3 or (result.get_fdata() != values).any()


def test_results_beyond_the_type_are_clipped_and_counted(denoise, tmp_path):
    values = np.random.default_rng(0).normal(2, 6, (32, 32, 2, 1)).clip(0, 255)
    path = nifti(tmp_path / "in.nii", np.rint(values).astype(np.uint8), scaling=(1, 100))
    _, report = denoise(path, sigma=6)
    assert report.clipped > 0 and any("are clipped" in one for one in report.notes)


STEPS = {
    "ddim": {"steps": 3},
    "ddpm": {"steps": 3, "scheduler": "ddpm"},
    "ddpm, another seed": {"steps": 3, "scheduler": "ddpm", "seed": 1},
}


def test_steps_change_the_result_and_no_slice_repeats_anothers_noise(denoise, tmp_path):
    values = np.repeat(noisy_series((16, 16, 1, 1)) + 1, 2, axis=2)
    path = nifti(tmp_path / "in.nii", values.astype(np.float32))
    results = {"one": denoise(path, sigma=50)[0].get_fdata()}
    for name, options in STEPS.items():
        results[name] = denoise(path, sigma=50, **options)[0].get_fdata()
        again = denoise(path, sigma=50, **options)[0].get_fdata()
        assert np.array_equal(results[name], again)
    made = list(results.values())
    assert all(not np.array_equal(made[i], made[j]) for i in range(4) for j in range(i))
    assert np.array_equal(results["one"][:, :, 0], results["one"][:, :, 1])
    assert not np.array_equal(results["ddpm"][:, :, 0], results["ddpm"][:, :, 1])


def test_a_dry_run_tells_levels_and_writes_nothing(denoise, weights, tmp_path):
    path = nifti(tmp_path / "in.nii", noisy_series())
    report = lowtide.denoise(path, tmp_path / "out.nii", model=weights, dry_run=True)
    assert report.images[0].status == "planned" and len(report.images[0].levels) == 4
    assert [one.name for one in tmp_path.iterdir()] == ["in.nii"]


def test_a_folder_keeps_its_tree_and_resumes(weights, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    (folder / "sub-1").mkdir(parents=True)
    nifti(folder / "t1.nii", noisy_series(seed=1))
    path = nifti(folder / "sub-1" / "in.nii.gz", noisy_series(seed=2))
    gradients(path, 4)
    options = dict(model=weights, budget="256MiB", sigma=50)
    report = lowtide.denoise(folder, out, **options)
    assert [one.status for one in report.images] == ["done", "done"]
    made = {one.relative_to(out).as_posix() for one in out.rglob("*") if one.is_file()}
    names = {"t1.nii", "sub-1/in.nii.gz", "sub-1/in.bval", "sub-1/in.bvec"}
    assert {one for one in made if ".lowtide" not in one} == names
    assert len(report.skipped_inputs) == 2  # the tables
    before = {name: (out / name).read_bytes() for name in names}
    (out / "t1.nii").unlink()
    report = lowtide.denoise(folder, out, **options)
    assert sorted(one.status for one in report.images) == ["done", "skipped"]
    assert before == {name: (out / name).read_bytes() for name in names}


def test_two_worker_processes_write_the_same_files(weights, tmp_path):
    (tmp_path / "in").mkdir()
    for seed in (1, 2):
        nifti(tmp_path / "in" / f"{seed}.nii", noisy_series(seed=seed))
    options = dict(model=weights, budget="1GiB", sigma=50)
    for name, devices in (("one", ()), ("two", ("cpu", "cpu"))):
        report = lowtide.denoise(tmp_path / "in", tmp_path / name, devices=devices, **options)
        assert [one.status for one in report.images] == ["done", "done"]
    for seed in (1, 2):
        one, two = ((tmp_path / name / f"{seed}.nii").read_bytes() for name in ("one", "two"))
        assert one == two


def test_snr_and_residual_are_reported(denoise, tmp_path):
    clean = brain((40, 40, 3, 2))
    labels = np.where(clean[..., 0] > 0, 1, 2).astype(np.uint8)
    path = nifti(tmp_path / "in.nii", RicianNoise(std=60).sample(clean, np.random.default_rng(0)))
    mask = nifti(tmp_path / "labels.nii.gz", labels)
    _, report = denoise(path, "out.nii", mask=mask, sigma=60)
    scores, residual = report.mask_scores, report.residual
    made, noisy = (nibabel.load(tmp_path / name).get_fdata() for name in ("out.nii", "in.nii"))
    signal, background = labels == 1, labels == 2
    for values, snr, cnr in (
        (noisy, scores.snr_before, scores.cnr_before),
        (made, scores.snr_after, scores.cnr_after),
    ):
        means = values[signal].mean(0), values[background].mean(0)
        deviation = values[background].std(0)
        assert snr == pytest.approx((means[0] / deviation).mean(), rel=1e-3)
        assert cnr == pytest.approx(((means[0] - means[1]) / deviation).mean(), rel=1e-3)
    removed = noisy - made
    ranges = survey_ranges(inspect_volume(path))
    inside = noisy > [one.threshold for one in ranges]
    found = [
        (np.corrcoef(removed[..., v][mask], made[..., v][mask])[0, 1], removed[..., v][mask].std())
        for v, mask in ((v, inside[..., v]) for v in range(2))
    ]
    expected = np.mean(found, 0)
    assert residual.image_correlation == pytest.approx(expected[0], abs=1e-3)
    assert residual.std == pytest.approx(expected[1], rel=1e-3)
    assert any(name == "SNR" for name, _ in report.details())
    json.loads(report.model_dump_json())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.ones((23, 19, 2), np.uint8), "23 × 19 × 2 × 1, and"),
        (np.zeros((23, 19, 3), np.uint8), "no voxel has a label above 0"),
    ],
)
def test_masks_that_do_not_fit_are_refused(denoise, tmp_path, labels, message):
    path, mask = nifti(tmp_path / "in.nii", noisy_series()), nifti(tmp_path / "m.nii", labels)
    with pytest.raises(InputError, match=message):
        denoise(path, mask=mask)
    assert not (tmp_path / "out.nii.gz").exists()


def bval_of_three(path):
    np.savetxt(path.with_name("in.bval"), [np.arange(3)])


def cut(path):
    path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.parametrize(("spoil", "message"), [(bval_of_three, "3 b-values"), (cut, "cut short")])
def test_bad_inputs_leave_nothing_behind(denoise, tmp_path, spoil, message):
    path = nifti(tmp_path / "in.nii", noisy_series())
    spoil(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LowtideError, match=message) as refused:
        denoise(path, "new/out.nii.gz")
    assert refused.value.exit_code == 2 and str(path) in refused.value.message
    assert sorted(tmp_path.rglob("*")) == before


def test_a_table_with_more_noise_than_a_file_is_refused(denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", noisy_series(std=20))
    with pytest.raises(UsageError, match="its noise is") as refused:
        denoise(path, noise=table(tmp_path / "t.json", 0.3))
    assert "train noise --volumes" in refused.value.hint
    with pytest.raises(UsageError, match="not that of MRI"):
        denoise(path, noise="poisson-gaussian")


def test_a_table_with_far_less_noise_than_a_file_is_noted(denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", noisy_series(std=20))
    _, report = denoise(path, noise=table(tmp_path / "t.json", 0.001))
    assert any("if that is noise, most of it stays" in note for note in report.notes)


def test_options_of_photographs_are_refused(denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", noisy_series())
    with pytest.raises(UsageError, match="--strip-metadata"):
        denoise(path, strip_metadata=True)
    setting = NoiseSetting(iso=800, parameters={"std": 0.05})
    NoiseTable(camera="a", noise_model="rician", settings=(setting,)).save(tmp_path / "t.json")
    with pytest.raises(UsageError, match="--iso 800"):
        denoise(path, noise=tmp_path / "t.json", iso=800)
    with pytest.raises(UsageError, match=r"\.png"):
        denoise(path, "out.png")
    with pytest.raises(ImageError, match=r"in.nii: this is not an image"):
        denoise(photograph(tmp_path), "out.png", mask=path)


def photograph(tmp_path: Path) -> Path:
    from PIL import Image

    Image.fromarray(np.full((8, 8, 3), 9, np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_photographs_and_volumes_together_need_a_kind(weights, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    photograph(folder)
    nifti(folder / "in.nii", noisy_series())
    with pytest.raises(UsageError, match="kind") as refused:
        lowtide.denoise(folder, tmp_path / "out", model=weights)
    assert "--kind volume" in refused.value.hint
    report = lowtide.denoise(folder, tmp_path / "out", model=weights, kind="volume", sigma=50)
    assert [one.status for one in report.images] == ["done"]


def test_another_table_next_to_the_result_is_not_replaced(denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", noisy_series())
    gradients(path, 4)
    (tmp_path / "out.bval").write_text("0 9 9 9\n")
    with pytest.raises(UsageError, match=r"out\.bval already exists"):
        denoise(path)
    assert not (tmp_path / "out.nii.gz").exists()


def test_memory_does_not_grow_with_volumes(weights, tmp_path):
    peaks, sizes = [], []
    for count in (2, 40):
        series = noisy_series((160, 160, 6, count)).astype(np.float32)
        path, out = nifti(tmp_path / f"{count}.nii", series), tmp_path / f"out{count}.nii"
        for _ in range(2):  # the first one warms up
            report = lowtide.denoise(path, out, model=weights, budget="256MiB", force=True)
        peaks.append(report.images[0].memory.peak_bytes)
        sizes.append(series.nbytes)
    # The heap's own steps are up to 8 MiB, the volumes added are 23.
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 2, (peaks, sizes)
