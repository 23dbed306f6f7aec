"""`--denoise` of `lowtide upscale` and `lowtide video`: two networks in one pass."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import lowtide
from lowtide import UsageError
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.models.loaded_model import pad_to_rule

DENOISER, UPSCALER = "lowtide-photo-denoise", "lowtide-x2"


@pytest.fixture(scope="module")
def noisy(photo):
    """A piece of the photograph with noise of 20, (61, 83, 3)."""
    noise = np.random.default_rng(0).normal(0, 20, (61, 83, 3))
    return np.rint((photo[100:161, 200:283] + noise).clip(0, 255)).astype(np.uint8)


@pytest.fixture
def upscale(noisy, tmp_path, save, read):
    def run(array=noisy, name="out.png", **options):
        source = save(tmp_path / ("in" + name[name.index(".") :]), array)
        options = {"budget": "512MiB", "force": True, "model": UPSCALER, **options}
        report = lowtide.upscale(source, tmp_path / name, **options)
        return read(tmp_path / name), report

    return run


def in_a_row(array, sigma):
    """What the denoiser makes of an array, enlarged, in levels of 255."""
    first, second = lowtide.load(DENOISER), lowtide.load(UPSCALER)
    first.module.set_level(sigma / 255)
    image = torch.from_numpy(np.float32(array / 255)).permute(2, 0, 1)[None].expand(1, 3, -1, -1)
    with torch.inference_mode():
        made = second.module(first.module(pad_to_rule(image, first.descriptor.size)).clamp(0, 1))
    made = made[0, :, : 2 * array.shape[0], : 2 * array.shape[1]].clamp(0, 1)
    return made.permute(1, 2, 0).numpy() * 255


@pytest.mark.parametrize("options", [{}, {"strategy": "streamed"}, {"tile": 64}])
def test_both_networks_run_as_one(upscale, noisy, options):
    result, report = upscale(denoise=20, **options)
    accuracy = report.images[0].accuracy.execution
    largest = abs(result - in_a_row(noisy, 20)).max()
    assert largest <= (1 if accuracy == "exact" else 8)
    assert report.model["name"] == f"{UPSCALER} after {DENOISER}"
    assert report.images[0].memory.within_budget
    assert report.images[0].details()[0] == ("noise", "sigma 20.0 of 255, given")
    plain, alone = upscale()
    assert (plain != result).any() and alone.model["sha256"] != report.model["sha256"]
    assert alone.images[0].details() == []


def test_the_level_is_that_of_each_picture(photo, tmp_path, save, read):
    noise = np.random.default_rng(1).normal(0, 1, (160, 200, 3))
    for sigma in (8, 25):
        array = np.rint((photo[:160, :200] + sigma * noise).clip(0, 255)).astype(np.uint8)
        save(tmp_path / "in" / f"{sigma}.png", array)
    options = {"budget": "512MiB", "denoise": "auto", "model": UPSCALER}
    planned = lowtide.plan(tmp_path / "in", tmp_path / "out", **options)
    report = lowtide.upscale(tmp_path / "in", tmp_path / "out", **options)
    levels = [image.sigma for image in report.images]
    assert sorted(levels) == pytest.approx([8, 25], rel=0.25)
    assert levels == [image.sigma for image in planned.images]
    assert {image.sigma_source for image in report.images} == {"estimated"}
    assert report.model_dump(mode="json")["images"][0]["sigma"] == levels[0]
    for image in report.images:
        made = in_a_row(read(image.input), image.sigma)
        assert abs(read(image.output) - made).max() <= 1


@pytest.mark.slow
def test_workers_report_levels_too(noisy, tmp_path, save):
    for name in ("a", "b"):
        save(tmp_path / "in" / f"{name}.png", noisy)
    options = {"budget": "1GiB", "denoise": 12, "devices": "cpu,cpu"}
    report = lowtide.upscale(tmp_path / "in", tmp_path / "out", **options)
    assert [image.sigma for image in report.images] == [12, 12]


def test_a_picture_without_noise_is_enlarged_as_it_is(upscale):
    ramp = np.tile(np.arange(60, 124, dtype=np.uint8)[None, :, None], (48, 1, 3))
    result, report = upscale(ramp, denoise="auto")
    assert any(
        "no noise was found, so that none is removed" in one for one in report.images[0].notes
    )
    assert abs(result.astype(int) - upscale(ramp)[0]).max() <= 1


def test_gray_and_alpha_are_kept(upscale, noisy):
    gray, _ = upscale(noisy[..., :1], denoise=20)
    assert gray.shape == (122, 166, 1)
    clear = np.zeros((61, 83, 1), np.uint8)
    clear[:, 40:] = 255
    result, _ = upscale(np.concatenate([noisy, clear], 2), denoise=20)
    assert (result[:, 84:, 3] == 255).all() and not result[:, :76, 3].any()


def test_floats_are_at_the_same_level(upscale, noisy):
    """Also of stars, for which a network's values are spread."""
    floats = (noisy / 255).astype(np.float32)
    even, report = upscale(floats, "out.tif", denoise="auto")
    floats[5, 5] = 3
    stars, found = upscale(floats, "out.tif", denoise=report.images[0].sigma)
    assert found.images[0].sigma == report.images[0].sigma
    change = (even - upscale(floats, "out.tif")[0])[40:].std()
    assert 0 < abs(stars - even)[40:].std() < change / 2


REFUSED = [
    ({"denoise": "lots"}, "--denoise lots is neither auto nor a noise level"),
    ({"denoise": 0}, "--denoise 0 is neither auto nor"),
    ({"denoise": 300}, "--denoise 300 is neither"),
    ({"denoise": "auto", "model": "x.onnx"}, "is not run behind a denoiser"),
]


def test_what_is_no_level_is_refused(upscale):
    for options, words in REFUSED:
        with pytest.raises(UsageError, match=words) as caught:
            upscale(**options)
        assert caught.value.hint
    hashes = {
        UpscaleSettings.of(denoise=one).content_hash("m", "fp32")
        for one in (None, "auto", 12, "12.0", 13)
    }
    assert len(hashes) == 4


def test_a_clip_has_one_level(photo, tmp_path):
    """That of its first frames, those of a fade from black among them; a part of it, of that."""
    av = pytest.importorskip("av")
    random = np.random.default_rng(0)
    with av.open(str(tmp_path / "in.mkv"), "w") as output:
        stream = output.add_stream("ffv1", rate=Fraction(25))
        stream.width, stream.height, stream.pix_fmt = 96, 64, "bgr0"
        for place in range(30):
            light = min(1, place / 20) * photo[120:184, 200 + place : 296 + place]
            frame = np.rint((light + random.normal(0, 15, light.shape)).clip(0, 255))
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame, np.uint8), "rgb24")
            output.mux(stream.encode(picture.reformat(format="bgr0")))
        output.mux(stream.encode(None))
    options = {"budget": "512MiB", "denoise": "auto", "codec": "ffv1", "frames": "0:26"}
    (clip,) = lowtide.video(tmp_path / "in.mkv", tmp_path / "out.mkv", **options).videos
    assert clip.status == "done" and clip.sigma == pytest.approx(15, rel=0.3)
    assert any("of the first frames, and taken for all" in text for _, text in clip.details())
    options |= {"denoise": None, "force": True}
    (plain,) = lowtide.video(tmp_path / "in.mkv", tmp_path / "plain.mkv", **options).videos
    assert plain.sigma is None
    first, second = (
        [one.to_ndarray(format="rgb24") for one in av.open(str(tmp_path / name)).decode(video=0)]
        for name in ("out.mkv", "plain.mkv")
    )
    assert len(first) == len(second) == 26
    steps = [abs(np.diff(one[-1].astype(float), axis=1)).mean() for one in (first, second)]
    assert steps[0] < 0.8 * steps[1]
