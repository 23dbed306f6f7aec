"""`lowtide denoise` on series of volumes and on their slices, masks and single Rician volumes."""

import threading

import nibabel
import numpy as np
import pytest

import lowtide
from lowtide import Cancelled, UsageError
from lowtide.jobs.denoise.volumes import job as volume_job
from lowtide.jobs.denoise.volumes.series import SeriesPatches
from lowtide.models.denoiser.noise_models import RicianNoise
from support.nifti_files import brain, nifti

SHAPE = (24, 21, 6, 8)


@pytest.fixture
def denoise(tmp_path, private_cache):
    """Denoise a file with the bundled network; returns the values and their report."""

    def run(path, name="out.nii", **options):
        options = {"budget": "1GiB", "force": True, **options}
        report = lowtide.denoise(path, tmp_path / name, **options)
        return nibabel.load(tmp_path / name).get_fdata(), report.images[0]

    return run


def series(std=50.0, shape=SHAPE, seed=0):
    return RicianNoise(std=std).sample(brain(shape), np.random.default_rng(seed))


def mppca(values, **options):
    from dipy.denoise.localpca import genpca

    return genpca(values.astype(np.float32), suppress_warning=True, **options)


def test_a_series_is_denoised_by_what_its_volumes_share(denoise, tmp_path):
    values = series() + 1  # no zeros, which would be a mask
    result, report = denoise(nifti(tmp_path / "in.nii", values))
    np.testing.assert_array_equal(result.astype(np.float32), mppca(values))
    assert report.method == "MP-PCA of 8 volumes in patches of 5 × 5 × 5, without the network"
    assert ("method", report.method) in report.details()
    clean, head = brain(SHAPE), brain(SHAPE) > 0
    errors = [np.std((one - clean)[head]) for one in (values, result)]
    assert errors[1] < 0.5 * errors[0]
    given, _ = denoise(nifti(tmp_path / "in.nii", values), sigma=50)
    np.testing.assert_array_equal(given.astype(np.float32), mppca(values, sigma=50.0))


def test_blocks_make_what_one_call_makes(monkeypatch, denoise, tmp_path):
    path = nifti(tmp_path / "in.nii.gz", series())
    whole, report = denoise(path)
    assert report.memory.within_budget
    monkeypatch.setattr(SeriesPatches, "rows_within", lambda self, limit: 2)
    made, _ = denoise(path)
    np.testing.assert_array_equal(made, whole)


def test_a_smaller_budget_makes_smaller_blocks_and_holds_them():
    patches = SeriesPatches.of((128, 128, 60, 65))
    for limit in (1 << 27, 1 << 28, 1 << 29):
        rows = patches.rows_within(limit)
        assert patches.bytes_of(rows) <= limit < patches.bytes_of(rows * 2)
    assert patches.rows_within(1) == 1 and patches.rows_within(1 << 40) == 128
    ends = [last for _, last, *_ in patches.blocks(40)]
    assert ends == [40, 80, 120, 128] and patches.lines(128) == 124 * 56


@pytest.mark.own_process
def test_a_series_stays_within_its_budget(denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", series(shape=(48, 96, 10, 24)).astype(np.int16))
    mask = np.zeros((48, 96, 10), np.uint8)
    mask[20, :, 5] = 1
    mask = nifti(tmp_path / "mask.nii", mask)
    _, report = denoise(path, budget="96MiB", mask=mask)
    assert report.method.startswith("MP-PCA") and not report.events
    assert report.memory.peak_bytes <= report.memory.upper_bytes <= 96 << 20


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((20, 20, 20, 3), (5, 5, 5)),
        ((20, 20, 20, 130), (7, 7, 7)),
        ((20, 20, 2, 20), (5, 5, 1)),
        ((20, 20, 1, 30), (7, 7, 1)),
        ((20, 20, 20, 2), None),
        ((3, 3, 1, 12), None),
    ],
)
def test_patches_have_more_voxels_than_volumes(shape, sizes):
    patches = SeriesPatches.of(shape)
    assert (patches and patches.sizes) == sizes


def test_a_network_runs_slices_where_one_is_asked_for(denoise, weights, tmp_path):
    path = nifti(tmp_path / "in.nii", series())
    whole, _ = denoise(path)
    by_slices, report = denoise(path, slices=True)
    named, _ = denoise(path, model="lowtide-denoise")
    np.testing.assert_array_equal(by_slices, named)
    assert not np.array_equal(by_slices, whole)
    assert report.method == "each slice by itself through the network"
    for options in ({"model": weights}, {"model": weights, "steps": 2}):
        assert denoise(path, **options)[1].method == report.method
    _, report = denoise(nifti(tmp_path / "one.nii", series()[..., :1]))
    assert report.method == "each slice by itself through the network"
    with pytest.raises(UsageError, match="--slices is for volumes"):
        lowtide.denoise(photograph(tmp_path), tmp_path / "out.png", slices=True)


def test_without_dipy_slices_are_run_and_the_report_says_so(monkeypatch, denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", series())
    expected, _ = denoise(path, slices=True)
    monkeypatch.setattr(volume_job, "has_dipy", lambda: False)
    result, report = denoise(path)
    np.testing.assert_array_equal(result, expected)
    assert "MP-PCA of the series needs dipy" in report.method and "[mri]" in report.method


def test_a_folder_does_not_mix_both_ways(denoise, tmp_path):
    (tmp_path / "in").mkdir()
    nifti(tmp_path / "in" / "a.nii", series())
    options = dict(budget="1GiB")
    lowtide.denoise(tmp_path / "in", tmp_path / "out", **options)
    report = lowtide.denoise(tmp_path / "in", tmp_path / "out", **options)
    assert report.images[0].status == "skipped"
    with pytest.raises(UsageError, match="slices"):
        lowtide.denoise(tmp_path / "in", tmp_path / "out", slices=True, **options)


def test_a_series_keeps_what_is_not_finite_and_reports_progress(denoise, tmp_path):
    values = series()
    plain, _ = denoise(nifti(tmp_path / "in.nii", values))
    values[5, 6, 1, 1], values[12, 11, 3, 2], values[8, 8, 2, 3] = np.nan, np.inf, 1e10
    seen = []
    result, report = denoise(nifti(tmp_path / "in.nii", values), progress=seen.append)
    odd = ~np.isfinite(values) | (values == np.float32(1e10))
    np.testing.assert_array_equal(result[odd], values[odd])
    assert report.not_finite == 3
    far = np.abs(result - plain)[..., 4:].max()
    assert far < 100  # two standard deviations of the noise
    steps = [one for one in seen if one.phase == "run"]
    assert steps[-1].done == steps[-1].total and len(steps) > SHAPE[2] * SHAPE[3]


def test_a_stop_in_a_series_leaves_nothing(denoise, tmp_path):
    path, stop = nifti(tmp_path / "in.nii", series()), threading.Event()

    def progress(one):
        if one.phase == "run" and one.done > 5:
            stop.set()

    with pytest.raises(Cancelled):
        denoise(path, progress=progress, cancel=stop)
    assert [one.name for one in tmp_path.iterdir()] == ["in.nii"]


def test_a_series_of_phases_keeps_its_range(denoise, tmp_path):
    x, y, z, v = np.meshgrid(*map(np.arange, SHAPE), indexing="ij")
    phase = 0.3 * x + 0.2 * y + 0.1 * z + 0.05 * v
    phase = phase + np.random.default_rng(0).normal(0, 0.15, SHAPE)
    wrapped = np.angle(np.exp(1j * phase)).astype(np.float32)
    for values in (wrapped, wrapped[..., :1]):
        result, _ = denoise(nifti(tmp_path / "in.nii", values))
        assert np.abs(result).max() <= np.pi and result.min() < -2
        assert (result != values).mean() > 0.9


def test_magnitudes_are_not_below_0(denoise, weights, tmp_path):
    path = nifti(tmp_path / "in.nii", series(std=120))
    for options in ({}, {"model": weights}, {"model": weights, "noise": "rician"}):
        assert denoise(path, **options)[0].min() >= 0


def test_voxels_outside_of_a_mask_are_copied(denoise, weights, tmp_path):
    values = series()
    labels = np.zeros(SHAPE[:3], np.uint8)
    labels[6:18, 5:15] = 1
    path, mask = nifti(tmp_path / "in.nii", values), nifti(tmp_path / "mask.nii", labels)
    whole, _ = denoise(path, model=weights)
    for options in ({"model": weights}, {}):
        result, report = denoise(path, mask=mask, **options)
        np.testing.assert_array_equal(result[labels == 0], values[labels == 0])
        assert (result != values)[labels == 1].mean() > 0.9 and report.mask_scores is None
        assert any(
            "2,304 voxels of a volume are outside of the mask" in one for one in report.notes
        )
        if options:
            np.testing.assert_array_equal(result[labels == 1], whole[labels == 1])


def test_another_mask_is_another_result(tmp_path, private_cache):
    (tmp_path / "in").mkdir()
    nifti(tmp_path / "in" / "a.nii", series())
    labels = np.ones(SHAPE[:3], np.uint8)
    options = dict(mask=nifti(tmp_path / "mask.nii", labels), budget="1GiB")
    lowtide.denoise(tmp_path / "in", tmp_path / "out", **options)
    labels[:5] = 0
    nifti(tmp_path / "mask.nii", labels)
    with pytest.raises(UsageError, match="mask"):
        lowtide.denoise(tmp_path / "in", tmp_path / "out", **options)
    with pytest.raises(UsageError, match="no such file"):
        lowtide.denoise(tmp_path / "in", tmp_path / "new", mask=tmp_path / "none.nii")


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_lie_across_the_thickest_axis(denoise, weights, tmp_path, axis):
    """As if the axis were the third of the file."""
    values = series(shape=(24, 21, 6, 2))
    third, _ = denoise(nifti(tmp_path / "third.nii", values), model=weights, sigma=50)
    path, order = tmp_path / "turned.nii", [0, 1, 2, 3]
    order.insert(axis, order.pop(2))
    sizes = [2.0, 2.0, 2.0]
    sizes[axis] = 5.0
    image = nibabel.Nifti1Image(values.transpose(order), np.diag([*sizes, 1]))
    nibabel.save(image, path)
    seen = []
    result, report = denoise(path, model=weights, sigma=50, progress=seen.append)
    np.testing.assert_allclose(result, third.transpose(order), atol=1e-3)
    name = ("first", "second")[axis]
    assert report.method.endswith(f"through the network, across the {name} axis, the thickest")
    steps = [one for one in seen if one.phase == "run"]
    assert steps[-1].done == steps[-1].total
    assert (report.plan.image.width, report.plan.image.height) == (24, 21)


def test_rician_noise_of_a_single_volume_is_estimated_or_given(denoise, weights, tmp_path):
    shape = (64, 64, 6, 1)
    path = nifti(tmp_path / "in.nii", series(std=40, shape=shape).astype(np.float32))
    outside = brain(shape) == 0
    for options, level in (({}, pytest.approx(40, rel=0.05)), ({"sigma": 40.0}, 40)):
        result, report = denoise(path, noise="rician", **options)
        assert report.sigma == level and report.noise == "rician"
        assert result[outside].mean() < 20 < 45 < nibabel.load(path).get_fdata()[outside].mean()
    assert dict(report.details())["noise"] == "sigma 40 in data units, rician, given"
    with pytest.raises(UsageError, match="alone does not tell the parameters of rician"):
        lowtide.denoise(photograph(tmp_path), tmp_path / "out.png", noise="rician")


def photograph(tmp_path):
    from PIL import Image

    Image.fromarray(np.full((8, 8, 3), 9, np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_rician_noise_of_a_series_is_removed_with_its_offset(denoise, tmp_path):
    path = nifti(tmp_path / "in.nii", series(std=60))
    outside = brain(SHAPE) == 0
    for options in ({}, {"sigma": 60.0}):
        result, report = denoise(path, noise="rician", **options)
        assert result[outside].mean() < 0.5 * nibabel.load(path).get_fdata()[outside].mean()
        assert report.method.startswith("MP-PCA")
