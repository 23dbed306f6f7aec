"""`lowtide denoise`: levels, steps, files and errors, with a small network of random weights."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import lowtide
from lowtide import UsageError
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.models.loaded_model import pad_to_rule
from support.image_folders import files_of, statuses

SIGMA = 25


@pytest.fixture
def denoise(weights, noisy, tmp_path, save, read):
    """Denoise an array, by default the noisy piece; returns the result and its report."""

    def run(array=noisy, name="out.png", **options):
        source = save(tmp_path / ("in" + name[name.index(".") :]), array)
        options = {"model": weights, "budget": "256MiB", "force": True, **options}
        report = lowtide.denoise(source, tmp_path / name, **options)
        return read(tmp_path / name), report.images[0]

    return run


def by_the_model(weights, array, sigma=SIGMA):
    """The plain network's result for an array, rounded to its type."""
    model, peak = lowtide.load(weights), np.iinfo(array.dtype).max
    model.module.set_level(sigma / 255)
    color = torch.from_numpy(np.float32(array / peak)).permute(2, 0, 1)[None]
    padded = pad_to_rule(color.expand(-1, 3, -1, -1), model.descriptor.size)
    result = model.module(padded)[0, :, : array.shape[0], : array.shape[1]].permute(1, 2, 0)
    result = result.mean(2, keepdim=True) if array.shape[2] == 1 else result
    return np.rint(result.clamp(0, 1).numpy() * peak).astype(array.dtype)


def test_the_result_is_that_of_the_network_at_this_level(denoise, weights, noisy):
    """Color and gray, 8 and 16 bits, odd sizes."""
    gray = noisy[..., :1]
    deep = noisy.astype(np.uint16) * 257
    for array in (noisy, gray, deep, noisy[:1, :1]):
        result, report = denoise(array, "out.tif", sigma=SIGMA)
        difference = result.astype(int) - by_the_model(weights, array)
        assert result.dtype == array.dtype and np.abs(difference).max() <= 1, array.shape
        assert (report.sigma, report.sigma_source, report.status) == (SIGMA, "given", "done")
        assert (result != array).any() and report.accuracy.execution == "exact"
        assert report.memory.within_budget


def test_the_level_is_estimated_for_each_image(denoise, weights, photo):
    levels = []
    for sigma in (10, 30):
        noise = np.random.default_rng(1).normal(0, sigma, (160, 200, 3))
        array = np.rint((photo[:160, :200] + noise).clip(0, 255)).astype(np.uint8)
        result, report = denoise(array)
        assert report.sigma_source == "estimated"
        assert np.abs(result.astype(int) - by_the_model(weights, array, report.sigma)).max() <= 1
        levels.append(report.sigma)
    assert levels == pytest.approx([10, 30], rel=0.25)


def test_without_noise_samples_are_copied(denoise, noisy):
    flat = np.full((30, 40, 3), 90, np.uint8)
    flat[:, 20:] = 170
    tiny, white = noisy[:2, :2], np.full((9, 9, 1), 255, np.uint8)
    for array, options, note, sigma in (
        (flat, {}, "no noise was found", 0),
        (noisy, {"sigma": 0}, "without noise samples are copied", 0),
        (tiny, {}, "no pixel tells the noise level", None),
        (white, {}, "no pixel tells the noise level", None),
    ):
        result, report = denoise(array, **options)
        assert np.array_equal(result, array)
        assert report.sigma == sigma and any(note in one for one in report.notes)


def test_alpha_is_copied_and_does_not_change_color(denoise, noisy):
    """Nor does what transparent pixels hide change the estimate."""
    alpha = np.tile(np.linspace(0, 255, 59).astype(np.uint8), (41, 1))[..., None]
    result, _ = denoise(np.concatenate([noisy, alpha], 2), sigma=SIGMA)
    plain, _ = denoise(sigma=SIGMA)
    assert np.array_equal(result[..., 3:], alpha) and np.array_equal(result[..., :3], plain)
    hidden = np.concatenate([noisy, np.full_like(noisy, 90)])
    alpha = np.repeat([255, 0], 41).astype(np.uint8)[:, None, None].repeat(59, 1)
    _, report = denoise(np.concatenate([hidden, alpha], 2))
    assert report.sigma == pytest.approx(SIGMA, rel=0.25)


STEPS = {
    "ddim": {"steps": 3},
    "ddim, eta": {"steps": 3, "eta": 0.5},
    "ddim, another seed": {"steps": 3, "eta": 0.5, "seed": 1},
    "ddpm": {"steps": 3, "scheduler": "ddpm"},
    "flow": {"steps": 3, "scheduler": "flow"},
    "dpmsolver++": {"steps": 3, "scheduler": "dpmsolver++"},
    "unipc": {"steps": 3, "scheduler": "unipc"},
    "unipc, more steps": {"steps": 4, "scheduler": "unipc"},
    "ddim, more steps": {"steps": 5},
}


def test_every_option_of_sampling_changes_the_result(denoise):
    results = {"one step": denoise(sigma=SIGMA)[0]}
    for name, options in STEPS.items():
        results[name], report = denoise(sigma=SIGMA, **options)
        assert report.memory.within_budget
        disk = sum(row.value for row in report.plan.ledger if row.place == "disk")
        files = 2 + {"dpmsolver++": 1, "unipc": 1, "unipc, more steps": 2}.get(name, 0)
        assert disk == files * 4 * 41 * 59 * 3
    assert len({result.tobytes() for result in results.values()}) == len(results)
    assert np.array_equal(results["ddpm"], denoise(sigma=SIGMA, **STEPS["ddpm"])[0])


@pytest.mark.slow
def test_streamed_steps_equal_whole_ones(denoise):
    for options in (STEPS["ddpm"], STEPS["unipc, more steps"], {}):
        whole, first = denoise(sigma=SIGMA, strategy="whole", **options)
        bands, second = denoise(sigma=SIGMA, strategy="streamed", **options)
        assert (first.plan.strategy.name, second.plan.strategy.name) == ("whole", "streamed")
        assert np.abs(whole.astype(int) - bands).max() <= 1
        assert second.accuracy.execution == "exact"


REFUSED = [
    ({"steps": 0}, "--steps 0 has to be at least 1$"),
    ({"steps": 1001}, "--steps 1001 has to be at most 1,000$"),
    ({"sigma": -1}, "--sigma -1 has to be at least 0$"),
    ({"sigma": float("nan")}, "--sigma nan has to be"),
    ({"scheduler": "euler", "steps": 2}, "--scheduler euler is not one of"),
    ({"scheduler": "ddpm"}, "a single step"),
    ({"eta": 0.5}, "a single step"),
    ({"eta": 0.5, "steps": 3, "scheduler": "ddpm"}, "--eta is for ddim"),
    ({"steps": 3, "tile": 32}, "the error of tiles is not measured"),
    ({"steps": 3, "accuracy": "fast"}, "the error of tiles is not measured"),
    ({"model": "lowtide-x2"}, "lowtide-x2 is no denoiser"),
    ({"scale": 2}, "there is no setting 'scale'"),
]


def test_invalid_values_are_refused(denoise, weights, tmp_path):
    for options, words in REFUSED:
        with pytest.raises(UsageError, match=words) as caught:
            denoise(**options)
        assert caught.value.hint or "setting" in words or "scheduler" in words
    with pytest.raises(UsageError, match="is a denoiser") as caught:
        lowtide.upscale(tmp_path / "in.png", tmp_path / "big.png", model=weights)
    assert "lowtide denoise" in caught.value.hint
    assert not (tmp_path / "out.png").exists()


def test_a_level_beyond_the_training_is_told(denoise):
    assert denoise(sigma=80)[1].notes == ["the model was trained up to a sigma of 60 of 255"]
    assert denoise(sigma=60)[1].notes == []


def test_settings_that_change_bytes_are_in_the_hash():
    same = {
        *("budget", "host_budget", "disk_budget", "scratch", "device", "devices", "streams"),
        *("model", "max_pixels", "suffix"),  # the model is hashed by its content
        "kind",  # what the files are in any case
    }
    plain = DenoiseSettings.of()
    for name in {field.name for field in fields(DenoiseSettings)} - {"plan_file", "noise", "mask"}:
        hashes = {one.content_hash("m", "fp32") for one in (plain, replace(plain, **{name: 7}))}
        assert (len(hashes) == 1) == (name in same), name


def test_folders_are_resumed(weights, noisy, tmp_path, save):
    save(tmp_path / "in" / "a.png", noisy)
    save(tmp_path / "in" / "deep" / "b.png", noisy[:20])
    (tmp_path / "in" / "deep" / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    given = (tmp_path / "in", tmp_path / "out")
    options = {"model": weights, "budget": "256MiB"}
    assert statuses(lowtide.denoise(*given, **options)) == ["done", "done", "failed"]
    assert sorted(files_of(tmp_path / "out")) == ["a.png", "deep/b.png"]
    again = lowtide.denoise(*given, **options)
    assert statuses(again) == ["skipped", "skipped", "failed"]
    other = lowtide.denoise(*given, sigma=SIGMA, **options)
    assert "--force to replace it" in (other.images[0].hint or "")
    forced = lowtide.denoise(*given, sigma=SIGMA, force=True, **options)
    assert statuses(forced) == ["done", "done", "failed"]
