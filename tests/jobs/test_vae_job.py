"""Videos to latents and back by a small video autoencoder with random weights."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("av")

import av

from lowtide import BudgetError, Cancelled, InputError, ModelError, UsageError
from lowtide.jobs.vae.command import decode, encode, roundtrip
from lowtide.media.video.video_facts import inspect_video
from support.tiny_autoencoders import built
from support.tiny_video_vae import tiny_video_vae
from support.video_clips import Clip, Sound

STAMPS = (0, 512, 1100, 1500, 2100, 2500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vae")
    tiny_video_vae(block_out_channels=(8, 8, 8, 8)).save(path)
    return path


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """Folder of diffusers: a latent for 2 frames and for 2 x 2 pixels."""
    from diffusers import AutoencoderKLWan

    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 0}
    sizes |= {"temperal_downsample": [True], "scale_factor_temporal": 2, "scale_factor_spatial": 2}
    path = tmp_path_factory.mktemp("wan")
    built(AutoencoderKLWan, **sizes).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("video") / "in.mkv"
    return Clip(
        frames=6, width=46, height=35, codec="ffv1", stamps=STAMPS, sounds=(Sound(seconds=0.2),)
    ).write(path)


def test_latents_and_back(wan, video, tmp_path):
    """6 frames of variable rate, of which latents make 9, and of a size that 2 does not divide."""
    seen, path = [], tmp_path / "latents.safetensors"
    how = {"model": wan, "budget": "256MiB"}
    made = encode(video, path, progress=seen.append, **how).clips[0]
    assert made.latents == (4, 5, 18, 23) and made.posterior == "mean"
    assert [one.done for one in seen if one.unit == "latents"][-1] == 5
    assert made.memory.within_budget and made.memory.peak_bytes <= made.memory.upper_bytes
    assert set(made.phases) == {"read", "encode", "write"}
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == ["latents"]
        latents = file.get_tensor("latents")
    assert latents.shape == (1, 4, 5, 18, 23)

    target, asked = tmp_path / "out.mkv", []

    def cancel():
        asked.append(len(asked))
        return len(asked) == 2  # after some chunks

    with pytest.raises(Cancelled):
        decode(path, target, codec="ffv1", cancel=cancel, **how)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    back = decode(path, target, codec="ffv1", **how).clips[0]
    assert (back.frames, back.width, back.height) == (6, 46, 35)
    facts, source = inspect_video(target), inspect_video(video)
    assert (facts.format.width, facts.format.height) == (46, 35)
    gaps = np.diff(facts.stamps) * float(facts.time_base)
    assert np.allclose(gaps, np.diff(source.stamps) * float(source.time_base), atol=1e-3)


@pytest.mark.slow
def test_a_round_trip_keeps_the_sound_and_says_what_is_lost(wan, video, tmp_path):
    how = {"model": wan, "budget": "256MiB"}
    both = roundtrip(video, target := tmp_path / "both.mkv", codec="ffv1", **how).clips[0]
    assert both.psnr_db is not None and 3 < both.worst_psnr_db <= both.psnr_db < 30
    assert 0 < both.ssim < 1 and inspect_video(target).frames == 6
    with av.open(str(target)) as found:
        assert [one.type for one in found.streams] == ["video", "audio"]
    assert roundtrip(video, **how).clips[0].psnr_db == both.psnr_db

    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path, seed in zip(paths, (3, 3, 4), strict=True):
        report = encode(video, path, sample=True, seed=seed, **how).clips[0]
    assert (report.posterior, report.seed) == ("sample", 4)
    first, same, other = (load_file(path)["latents"] for path in paths)
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.parametrize("name", ["folder", pytest.param("wan", marks=pytest.mark.slow)])
def test_results_are_compared_with_the_models_own_call(name, video, tmp_path, request):
    how = {"model": request.getfixturevalue(name), "budget": "512MiB", "frames": "0:5"}
    done = roundtrip(video, tmp_path / "out.mkv", codec="ffv1", verify=True, **how).clips[0]
    encoder, decoder = done.checks
    assert (encoder.part, decoder.part) == ("encoder", "decoder")
    assert 0 < encoder.compared <= encoder.total and encoder.max_error < 1e-4 < encoder.largest
    assert 0 < decoder.compared <= decoder.total == 5 and decoder.max_error < 1e-4
    assert decoder.ssim > 0.9999 and done.memory.measurement_peak_bytes is not None


def test_a_plan_writes_nothing(folder, video, tmp_path):
    how = {"model": folder, "budget": "256MiB", "dry_run": True}
    planned = encode(video, tmp_path / "l.safetensors", frames="0:1", max_side=24, **how).clips[0]
    assert planned.status == "planned" and planned.latents == (4, 1, 3, 3)
    assert (planned.width, planned.height) == (24, 18)
    assert "streamed" in planned.plans["encoder"]
    assert not list(tmp_path.iterdir())
    with pytest.raises(BudgetError, match="and its frames need at least") as refusal:
        encode(video, tmp_path / "l.safetensors", **how | {"budget": "2MiB"})
    assert refusal.value.smallest > 2 << 20


def test_bad_latents(folder, tmp_path):
    path, target = tmp_path / "l.safetensors", tmp_path / "out.mp4"
    good = torch.zeros(1, 4, 2, 3, 3)
    for tensors, text in (
        ({"samples": good}, "holds no tensor 'latents', only samples"),
        ({"latents": good.repeat(2, 1, 1, 1, 1)}, r"latents of 2 clips \(2×4×2×3×3\)"),
        ({"latents": good / 0}, "not finite"),
        ({"latents": good.long()}, "of floating point, not torch.int64"),
        ({"latents": good[0, 0]}, "not torch.float32 2×3×3"),
        ({"latents": good[:, :3].contiguous()}, "latents of 3 channels, and those of this"),
    ):
        save_file(tensors, path)
        with pytest.raises(InputError, match=text):
            decode(path, target, model=folder)
    for entry, text in (
        ("{", "what it says of its clip is wrong"),
        (ENTRY.replace("5", "99", 1), "stamps are not those"),
        (ENTRY.replace('"height": 24', '"height": 99'), "make 5 frames of 24×24, not the 5 of 99"),
        (ENTRY.replace("VideoVAE", "AutoencoderKLWan"), "latents of AutoencoderKLWan"),
        (ENTRY.replace("1/25", "0/25"), "time_base"),
    ):
        save_file({"latents": good}, path, {"lowtide.clip": entry})
        with pytest.raises(InputError, match=text):
            decode(path, target, model=folder)
    save_file({"latents": good}, path, {"lowtide.clip": ENTRY})
    with pytest.raises(UsageError, match="says when its frames are shown"):
        decode(path, target, model=folder, fps=25)
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match="damaged"):
        decode(path, target, model=folder)
    with pytest.raises(InputError, match="no such file"):
        decode(tmp_path / "none", target, model=folder)
    assert [one.name for one in tmp_path.iterdir()] == ["l.safetensors"]


ENTRY = (
    '{"frames": 5, "model": "VideoVAE", "height": 24, "width": 24, "time_base": "1/25",'
    ' "stamps": [0, 1, 2, 3, 4]}'
)


def test_bad_models_and_settings(folder, video, tmp_path):
    output = tmp_path / "l.safetensors"
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ModelError, match=r"there is no config\.json"):
        encode(video, output, model=other)
    (other / "config.json").write_text('{"_class_name": "AutoencoderKLLTXVideo"}')
    with pytest.raises(UsageError, match="is a AutoencoderKLLTXVideo, which cannot run in bands"):
        encode(video, output, model=other)
    (other / "config.json").write_text("[")
    with pytest.raises(ModelError, match="is damaged"):
        encode(video, output, model=other)
    with pytest.raises(UsageError, match="no model is named"):
        encode(video, output)
    with pytest.raises(UsageError, match="is no name of latents"):
        encode(video, tmp_path / "l.mp4", model=folder)
    with pytest.raises(UsageError, match="is a sequence of images"):
        roundtrip(video, tmp_path / "%04d.png", model=folder)
    with pytest.raises(UsageError, match="holds no frame"):
        encode(video, output, model=folder, frames="9:12")
    with pytest.raises(Cancelled):
        encode(video, output, model=folder, cancel=lambda: True)
    output.write_bytes(b"mine")
    with pytest.raises(UsageError, match="already exists"):
        encode(video, output, model=folder)
    assert output.read_bytes() == b"mine"
    before = video.read_bytes()
    with pytest.raises(UsageError, match="this output is the input"):
        roundtrip(video, video, model=folder, force=True)
    assert video.read_bytes() == before
