"""Scores and pictures of `lowtide denoise`, with a small network of random weights."""

import json

import numpy as np
import pytest

import lowtide
from lowtide import ImageError, UsageError
from lowtide.core.metrics import psnr, ssim
from lowtide.jobs.denoise import scores as denoise_scores
from lowtide.jobs.denoise.comparisons import ReferenceFiles, non_local_means
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.media.discover import MediaKind
from support.denoiser_files import denoiser_file
from support.image_folders import files_of

SHAPE = 41, 59


@pytest.fixture(scope="module")
def weights(tmp_path_factory, private_cache):
    return denoiser_file(tmp_path_factory.mktemp("denoiser") / "small.safetensors")


@pytest.fixture
def clean(photo):
    return photo[100 : 100 + SHAPE[0], 200 : 200 + SHAPE[1]]


@pytest.fixture
def noisy(clean):
    noise = np.random.default_rng(0).normal(0, 25, clean.shape)
    return np.rint((clean * 0.9 + noise).clip(0, 255)).astype(np.uint8)


@pytest.fixture
def denoise(weights, tmp_path):
    def run(source, output, **options):
        options = {"model": weights, "budget": "256MiB", "sigma": 25, **options}
        return lowtide.denoise(source, tmp_path / output, **options).images

    return run


def expected(image, clean):
    """Raw and aligned (PSNR, SSIM) by the whole arrays, and the gain."""
    image, clean = image.astype(float), clean.astype(float)
    (gain,) = np.linalg.lstsq(image.reshape(-1, 1), clean.reshape(-1), rcond=None)[0]
    pairs = ((psnr(one, clean), ssim(one, clean)) for one in (image, gain * image))
    return *pairs, gain


def found(scores):
    return *((one.psnr_db, one.ssim) for one in (scores.raw, scores.aligned)), scores.gain


@pytest.mark.parametrize("kind", ["color", "gray", "alpha", "deep"])
def test_scores_are_those_of_the_whole_files(
    denoise, noisy, clean, kind, tmp_path, save, read, monkeypatch
):
    """In bands of few rows, whatever the sample type of each file; without alpha."""
    monkeypatch.setattr(denoise_scores, "_BAND_PIXELS", 4 * SHAPE[1])
    array, truth = noisy, clean
    if kind == "gray":
        array, truth = noisy[..., :1], clean[..., :1]
    elif kind == "alpha":
        array = np.concatenate([noisy, np.full((*SHAPE, 1), 200, np.uint8)], 2)
    elif kind == "deep":
        array, truth = noisy.astype(np.uint16) * 257, np.float32(clean / 255)
    source = save(tmp_path / "in.tif", array)
    reference = save(tmp_path / "truth.tif", truth)
    (image,) = denoise(source, "out.tif", reference=reference)
    color = truth.shape[2]
    truth = truth.astype(float) / (1 if kind == "deep" else 255)
    peak = np.iinfo(array.dtype).max
    for scores, samples in (
        (image.scores.noisy, array),
        (image.scores.result, read(tmp_path / "out.tif")),
    ):
        whole = expected(samples[..., :color] / peak, truth)
        for one, other in zip(found(scores), whole, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
    assert image.scores.noisy.gain == pytest.approx(1 / 0.9, abs=0.1)
    assert image.scores.noisy.aligned.psnr_db > image.scores.noisy.raw.psnr_db
    names = [name for name, _ in image.details()]
    assert names == ["noise", "scores", ""]


def test_equal_and_tiny_images(denoise, clean, tmp_path, save):
    source = save(tmp_path / "in.png", clean[:5, :7])
    (image,) = denoise(source, "out.png", reference=source, sigma=0)
    assert image.scores.result.raw.psnr_db is None and image.scores.result.raw.ssim is None
    assert "no difference → no difference, too small for SSIM" in image.details()[1][1]
    black = save(tmp_path / "black.png", np.zeros((20, 20, 1), np.uint8))
    (image,) = denoise(black, "dark.png", reference=black, sigma=0)
    assert image.scores.result.raw.ssim == 1 and image.scores.result.gain == 1


def test_folders_have_a_reference_for_each_and_sidecars_have_scores(
    denoise, noisy, clean, tmp_path, save
):
    save(tmp_path / "in" / "a.png", noisy)
    save(tmp_path / "in" / "deep" / "b.png", noisy[:20])
    (tmp_path / "in" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    truth = tmp_path / "truth"
    save(truth / "a.png", clean)
    given = {"reference": truth, "sidecar": True}
    (tmp_path / "truth" / "broken.png").write_bytes((truth / "a.png").read_bytes())
    with pytest.raises(UsageError, match=r"deep/b.png: there is no such file") as caught:
        denoise(tmp_path / "in", "out", **given)
    assert "same relative names" in caught.value.hint and not (tmp_path / "out").exists()
    save(truth / "deep" / "b.png", clean[:20])
    images = {
        image.input.rpartition("/")[2]: image for image in denoise(tmp_path / "in", "out", **given)
    }
    assert images["broken.png"].status == "failed" and images["broken.png"].scores is None
    kept = json.loads((tmp_path / "out" / "deep" / "b.png.lowtide.json").read_text())
    assert kept["image"]["scores"] == images["b.png"].scores.model_dump(mode="json")
    again = {image.status: image for image in denoise(tmp_path / "in", "out", **given)}
    assert again["skipped"].scores is not None


def test_what_cannot_be_compared_is_refused_before_the_run(denoise, noisy, clean, tmp_path, save):
    source, truth = save(tmp_path / "in.png", noisy), save(tmp_path / "truth.png", clean)
    small = save(tmp_path / "small.png", clean[:40])
    gray = save(tmp_path / "gray.png", clean[..., :1])
    (tmp_path / "broken.png").write_bytes(b"no image")
    before = files_of(tmp_path)
    for options, error, words in (
        ({"reference": small}, ImageError, "59×40 with 3 color channels, and .* is 59×41"),
        ({"reference": gray}, ImageError, "59×41 with 1 color channels"),
        ({"reference": tmp_path / "none.png"}, UsageError, "there is no such file"),
        ({"reference": tmp_path / "broken.png"}, ImageError, "broken.png: this is"),
        ({"comparison": tmp_path / "x.bmp"}, UsageError, "not written as .bmp"),
        ({"comparison": truth}, UsageError, "already exists"),
        ({"comparison": source, "force": True}, UsageError, "is the input"),
        ({"comparison": truth, "reference": truth, "force": True}, UsageError, "is the input"),
        ({"comparison": tmp_path / "no" / "x.png"}, UsageError, "no such folder"),
    ):
        for dry_run in (False, True):
            with pytest.raises(error, match=words) as caught:
                denoise(source, "out.png", dry_run=dry_run, **options)
            assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="this output is the reference"):
        denoise(source, "truth.png", reference=truth, force=True)
    tables = MediaKind("table", (".csv",), lambda suffix: None)
    with pytest.raises(UsageError, match="are for images, not for a table"):
        ReferenceFiles.find(tables, source, "x", DenoiseSettings.of(), truth, None, force=False)
    with pytest.raises(UsageError, match="is no folder, and there are 2 inputs"):
        denoise([source, truth], "out", reference=small)
    with pytest.raises(UsageError, match="--comparison draws one file"):
        denoise([source, truth], "out", comparison=tmp_path / "x.png")
    assert files_of(tmp_path) == before


def test_the_picture_has_a_pixel_for_each_of_the_most_detailed_part(
    denoise, photo, tmp_path, save, read
):
    pytest.importorskip("matplotlib")
    pytest.importorskip("skimage")
    flat = np.full((500, 700, 1), 120, np.uint8)
    flat[10:410, 200:680] = photo[:, :480, :1]
    noise = np.random.default_rng(0).normal(0, 20, flat.shape)
    noisy = np.rint((flat + noise).clip(0, 255)).astype(np.uint8)
    source, truth = save(tmp_path / "in.png", noisy), save(tmp_path / "truth.png", flat)
    path = tmp_path / "picture.png"
    denoise(source, "out.png", comparison=path, reference=truth)
    picture = read(path)[..., 0]
    # Found again by its pixels, where blocks of 16 may begin.
    places = [
        (top, left)
        for top in range(0, 21, 4)
        for left in range(160, 221, 4)
        if (picture[24:504, 8:488] == noisy[top : top + 480, left : left + 480, 0]).all()
    ]
    ((top, left),) = places
    result = read(tmp_path / "out.png")
    assert (picture[24:504, 496:976] == result[top : top + 480, left : left + 480, 0]).all()
    assert picture.shape[1] == 8 + 4 * 488
    with pytest.raises(UsageError, match="already exists"):
        denoise(source, "out2.png", comparison=path)


def test_an_image_without_noise_has_no_non_local_means(denoise, clean, tmp_path, save, read):
    pytest.importorskip("matplotlib")
    pytest.importorskip("skimage")
    source = save(tmp_path / "in.png", clean)
    denoise(source, "out.png", comparison=tmp_path / "picture.png", sigma=0)
    assert read(tmp_path / "picture.png").shape[1] == 8 + 3 * 208
    noisy = clean / 255 + np.random.default_rng(0).normal(0, 0.1, clean.shape)
    assert psnr(non_local_means(noisy, 0.1), clean / 255) > psnr(noisy, clean / 255) + 3


def test_missing_packages_are_named(denoise, noisy, tmp_path, save, monkeypatch):
    source = save(tmp_path / "in.png", noisy)
    for module, extra in (("matplotlib.figure", "plot"), ("skimage.restoration", "train")):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, module, None)
            with pytest.raises(UsageError) as caught:
                denoise(source, "out.png", comparison=tmp_path / "picture.png")
        assert caught.value.hint.endswith(f"pip install '.[{extra}]'")
    assert not (tmp_path / "out.png").exists()


def test_noise_beyond_the_range_of_float_files_is_kept(denoise, weights, tmp_path, save, read):
    """Black with noise: clipped, its mean would be far above."""
    noise = np.random.default_rng(0).normal(0, 0.1, (64, 64, 1)).astype(np.float32)
    truth = save(tmp_path / "truth.tif", np.zeros_like(noise))
    source = save(tmp_path / "in.tif", noise)
    (image,) = denoise(source, "out.tif", reference=truth, sigma=0)
    assert np.array_equal(read(tmp_path / "out.tif"), noise)
    assert image.scores.noisy.raw.psnr_db == pytest.approx(20, abs=0.3)
    denoise(source, "dark.tif", force=True)
    model = lowtide.load(weights)
    model.module.set_level(25 / 255)
    import torch

    whole = model.module(torch.from_numpy(noise[..., 0])[None, None].expand(1, 3, -1, -1))
    made = whole.mean(1)[0].numpy()
    assert np.abs(read(tmp_path / "dark.tif")[..., 0] - made).max() < 1e-5
