"""Control of `lowtide denoise`: strength, colors alone, a mask and a preview."""

import shutil

import numpy as np
import pytest

import lowtide
from lowtide import UsageError
from lowtide.jobs.denoise.parts import BlendSettings
from lowtide.jobs.denoise.settings import DenoiseSettings
from support.image_folders import statuses

SIGMA = 25
LUMA = np.array([0.299, 0.587, 0.114])


@pytest.fixture
def denoise(weights, noisy, tmp_path, save, read):
    """Denoise an array, by default the noisy piece; returns the result and its report."""

    def run(array=noisy, name="out.tif", **options):
        source = save(tmp_path / ("in" + name[name.index(".") :]), array)
        options = {"model": weights, "budget": "256MiB", "force": True, "sigma": SIGMA, **options}
        report = lowtide.denoise(source, tmp_path / name, **options)
        return read(tmp_path / name), report.images[0]

    return run


@pytest.mark.parametrize("kind", ["color", "alpha", "deep", "float"])
def test_strength_goes_from_the_input_to_the_result(denoise, noisy, kind):
    array = {
        "color": noisy,
        "alpha": np.concatenate([noisy, noisy[..., :1]], 2),
        "deep": noisy.astype(np.uint16) * 257,
        "float": (noisy / 200 - 0.1).astype(np.float32),
    }[kind]
    full, report = denoise(array)
    assert report.strength == 1 and report.control() == []
    assert np.array_equal(denoise(array, strength=1)[0], full) and (full != array).any()
    assert np.array_equal(denoise(array, strength=0)[0], array)
    half, report = denoise(array, strength=0.25, strategy="streamed")
    step = 0 if kind == "float" else 1
    expected = array + 0.25 * (full.astype(float) - array)
    assert abs(half - expected).max() <= step + 1e-6
    assert ("control", "strength 0.25") in report.details()


def test_strength_holds_over_several_steps(denoise, noisy):
    full, _ = denoise(steps=2)
    half, _ = denoise(steps=2, strength=0.5)
    assert abs(half - (noisy + full.astype(float)) / 2).max() <= 0.5
    assert np.array_equal(denoise(steps=2, strength=0)[0], noisy)


def test_colors_alone_keep_the_brightness(denoise, noisy):
    result, report = denoise(chroma_only=True)
    assert abs((result - noisy.astype(float)) @ LUMA).max() <= 0.5
    full, _ = denoise()
    chroma = (one - (one @ LUMA)[..., None] for one in (result, full))
    assert np.median(abs(np.subtract(*chroma))) < 1
    assert report.chroma_only and report.control() == [("control", "colors alone")]
    gray, report = denoise(noisy[..., :1], chroma_only=True)
    assert np.array_equal(gray, noisy[..., :1]) and any("gray" in one for one in report.notes)


def test_brightness_stays_where_colors_are_at_their_limits():
    """Instead of a clipped color one that is paler."""
    before = np.array([[[255, 255, 250], [0, 0, 0], [200, 100, 250]]], np.uint8)
    after = np.array([[[255, 180, 0], [90, 0, 0], [255, 0, 255]]], np.uint8)
    made = BlendSettings(chroma_only=True, white=255).rows(before, after)
    assert abs((made - before.astype(float)) @ LUMA).max() <= 0.5
    assert (made[0, 2] != before[0, 2]).any() and not made[0, 1].any()


def test_values_that_are_not_finite_stay():
    before = np.array([[[np.nan, 0.5, 0.2], [np.inf, 1, 1]]], np.float32)
    after = np.array([[[np.nan, 0.4, 0.4], [np.inf, 2, 2]]], np.float32)
    for blend in (
        BlendSettings(0.5),
        BlendSettings(0.5, chroma_only=True),
        BlendSettings(chroma_only=True),
    ):
        made = blend.rows(before, after, np.full((1, 2, 1), 0.5))
        assert np.array_equal(np.isfinite(made), np.isfinite(before))


def test_a_mask_restricts(denoise, noisy, tmp_path, save):
    """White is denoised, black stays, gray is mixed; in bands as whole, with strength too."""
    full, _ = denoise()
    shades = np.zeros((*noisy.shape[:2], 1), np.uint8)
    shades[10:30, 20:] = 255
    shades[30:] = 51
    mask = save(tmp_path / "mask.png", shades)
    for strategy in ("whole", "streamed"):
        result, report = denoise(mask=mask, strategy=strategy)
        assert np.array_equal(result[shades[..., 0] == 0], noisy[shades[..., 0] == 0])
        assert abs(result.astype(int) - full)[shades[..., 0] == 255].max() <= 1
        mixed = noisy + 0.2 * (full.astype(float) - noisy)
        assert abs(result - mixed)[30:].max() <= 1.2
        assert f"where {mask} is white" in report.control()[0][1]
    half, _ = denoise(mask=mask, strength=0.5)
    assert abs(half - (noisy + full.astype(float)) / 2)[10:30, 20:].max() <= 0.5
    clear = np.concatenate([np.full_like(noisy, 255), shades], 2)
    result, _ = denoise(mask=save(tmp_path / "clear.png", clear))
    assert np.array_equal(result[:10], noisy[:10]) and (result[15, 40:] != noisy[15, 40:]).any()


def test_a_preview_is_that_part_at_the_level_of_all(denoise, weights, photo, tmp_path, save):
    noise = np.random.default_rng(1).normal(0, 20, (160, 200, 3))
    array = np.rint((photo[:160, :200] + noise).clip(0, 255)).astype(np.uint8)
    array[:64] = 90
    shades = np.zeros((160, 200), np.uint8)
    shades[90:] = 255
    _, whole = denoise(array, sigma=None)
    options = {"sigma": None, "mask": save(tmp_path / "mask.png", shades[..., None])}
    result, report = denoise(array, preview="20,70,64,40", **options)
    assert report.sigma == whole.sigma and result.shape == (40, 64, 3)
    assert (report.width, report.height, report.out_height) == (64, 40, 40)
    part = array[70:110, 20:84]
    alone, _ = denoise(part, sigma=report.sigma)
    assert np.array_equal(result[:20], part[:20]) and np.array_equal(result[20:], alone[20:])
    assert "a preview of 64×40 pixels at 20,70" in report.control()[0][1]
    edge, _ = denoise(array, preview=(199, 159, 1, 1))
    assert edge.shape == (1, 1, 3)


REFUSED = [
    ({"strength": 1.5}, "--strength 1.5 has to be at most 1", "--strength 0.5"),
    ({"strength": -1}, "--strength -1 has to be at least 0", "--strength 0.5"),
    ({"preview": "1,2,3"}, "--preview 1,2,3 is not X,Y,W,H", "--preview"),
    ({"preview": "0,0,0,5"}, "is not X,Y,W,H", "--preview"),
    ({"preview": (0, 1.5, 4, 4)}, "is not X,Y,W,H", "--preview"),
    ({"preview": "50,0,20,41"}, "in.tif, which is 59×41", "--preview 39,0,20,41"),
    ({"preview": "0,0,99,99"}, "in.tif, which is 59×41", "--preview 0,0,59,41"),
    ({"preview": "0,0,9,9", "reference": "in.tif"}, "--preview writes a part", "drop"),
    ({"mask": "none.png"}, "none.png: no such file", "--mask"),
    ({"kind": "raw", "chroma_only": True}, "--chroma-only is for pictures", "drop it"),
    ({"kind": "raw", "mask": __file__}, "--mask is for pictures and volumes", "drop it"),
    ({"kind": "volume", "preview": "0,0,9,9"}, "--preview is for pictures", "drop it"),
]


def test_what_cannot_be_is_refused(denoise, tmp_path):
    for options, words, hint in REFUSED:
        with pytest.raises(UsageError, match=words) as caught:
            denoise(**options)
        assert hint in caught.value.hint, options
    assert not (tmp_path / "out.tif").exists()


def test_a_mask_of_another_size_is_refused_by_name(denoise, noisy, tmp_path, save):
    mask = save(tmp_path / "mask.png", noisy[:40])
    with pytest.raises(UsageError, match=r"mask.png is 59×40, and .*in.tif is 59×41"):
        denoise(mask=mask)


def test_other_control_is_another_result(weights, noisy, tmp_path, save):
    """A folder goes on with the same settings, and not with others nor another mask."""
    save(tmp_path / "in" / "a.png", noisy)
    save(tmp_path / "in" / "small.png", noisy[:20])
    mask = save(tmp_path / "mask.png", np.full_like(noisy, 255))
    given = (tmp_path / "in", tmp_path / "out")
    options = {"model": weights, "budget": "256MiB", "sigma": SIGMA, "mask": mask}
    first = lowtide.denoise(*given, **options)
    assert statuses(first) == ["done", "failed"] and "59×20" in first.images[1].error
    assert statuses(lowtide.denoise(*given, **options)) == ["skipped", "failed"]
    shutil.copy(save(tmp_path / "other.png", np.zeros_like(noisy)), mask)
    again = lowtide.denoise(*given, **options)
    assert again.images[0].status == "failed" and "mask" in again.images[0].error
    plain = DenoiseSettings.of().content_hash("m", "fp32")
    for changed in ({"strength": 0.5}, {"chroma_only": True}, {"preview": "0,0,9,9"}):
        assert DenoiseSettings.of(**changed).content_hash("m", "fp32") != plain
