"""Video autoencoders at their limits: precision, the least budget, a full disk, long clips."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("av")

import av

from lowtide import BudgetError, NotFiniteError, OutputError
from lowtide.jobs.vae.command import decode, encode, roundtrip
from support.tiny_autoencoders import built
from support.video_clips import Clip

SIZES = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 0}
SIZES |= {"temperal_downsample": [True], "scale_factor_temporal": 2, "scale_factor_spatial": 2}


@pytest.fixture(scope="module")
def vae():
    from diffusers import AutoencoderKLWan

    return built(AutoencoderKLWan, **SIZES)


@pytest.fixture(scope="module")
def wan(vae, tmp_path_factory):
    vae.save_pretrained(path := tmp_path_factory.mktemp("wan"))
    return path


@pytest.fixture(scope="module")
def steep(vae, tmp_path_factory):
    """Folder of one whose decoder makes much more of its latents."""
    other = deepcopy(vae)
    other.decoder.conv_in.weight.data.mul_(100)
    other.save_pretrained(path := tmp_path_factory.mktemp("steep"))
    return path


def samples(path):
    """Samples of all frames as they are stored."""
    with av.open(str(path)) as file:
        return np.stack([one.to_ndarray() for one in file.decode(video=0)])


def test_what_exceeds_fp16_is_decoded_again(steep, tmp_path):
    """The first latents fit, and later ones do not: all frames are those of the wider run."""
    latents = torch.rand(1, 4, 4, 9, 8, generator=torch.Generator().manual_seed(3)).sub(0.5)
    latents[:, :, 2:] *= 3e4
    save_file({"latents": latents}, given := tmp_path / "l.safetensors")
    how = {"model": steep, "budget": "256MiB", "codec": "ffv1"}
    done = decode(given, half := tmp_path / "half.mkv", precision="fp16", **how).clips[0]
    assert done.frames == 7
    assert any("exceed the range of fp16: run again in fp32" in one for one in done.events)
    plain = decode(given, full := tmp_path / "full.mkv", **how).clips[0]
    assert plain.precision == "fp32" and plain.events == []
    assert done.precision == "fp32"
    assert np.array_equal(samples(half), samples(full))


def test_bf16_and_what_no_precision_holds(wan, steep, tmp_path):
    clip = Clip(frames=4, width=32, height=24, codec="ffv1").write(tmp_path / "in.mkv")
    paths = [tmp_path / f"{name}.safetensors" for name in ("fp32", "bf16")]
    for path in paths:
        encode(clip, path, model=wan, budget="256MiB", precision=path.stem)
    one, other = (load_file(path)["latents"] for path in paths)
    assert 0 < (one - other).abs().max() <= 0.03 * one.abs().max()
    assert one.dtype == other.dtype == torch.float32

    save_file({"latents": torch.full_like(one, 3e38)}, huge := tmp_path / "huge.safetensors")
    for precision in ("fp32", "bf16", "fp16"):
        with pytest.raises(NotFiniteError, match="chunk 1 that the model made has values"):
            decode(huge, tmp_path / "out.mkv", model=steep, budget="256MiB", precision=precision)
    assert not (tmp_path / "out.mkv").exists()


def test_the_least_budget_is_enough_for_both_parts(wan, tmp_path):
    clip = Clip(frames=9, width=160, height=120).write(tmp_path / "in.mp4")
    how = {"model": wan, "codec": "ffv1"}
    with pytest.raises(BudgetError, match="need at least") as refusal:
        roundtrip(clip, tmp_path / "out.mkv", budget="4MiB", **how)
    least = refusal.value.smallest
    done = roundtrip(clip, tmp_path / "out.mkv", budget=least, **how).clips[0]
    assert done.memory.within_budget and done.memory.upper_bytes <= least
    assert {row.name for row in done.memory.ledger} >= {"chunks, bands and state", "latents"}


def test_memory_does_not_grow_with_the_clip(wan, tmp_path):
    """What is planned; latents are small, and stay."""
    found = {}
    for frames in (5, 41):
        clip = Clip(frames=frames, width=64, height=48).write(tmp_path / f"{frames}.mp4")
        done = encode(clip, tmp_path / f"{frames}.safetensors", model=wan, budget="256MiB")
        found[frames] = {row.name: row.value for row in done.clips[0].memory.ledger}
    short, long = (found[frames] for frames in (5, 41))
    assert long.pop("latents") == 7 * short.pop("latents")
    assert long == short


def test_a_full_disk(wan, tmp_path, files_of_at_most):
    clip = Clip(frames=5, width=64, height=48).write(tmp_path / "in.mp4")
    how = {"model": wan, "budget": "256MiB"}
    encode(clip, latents := tmp_path / "l.safetensors", **how)
    before = sorted(tmp_path.iterdir())
    with files_of_at_most(1000):
        with pytest.raises(OutputError, match="the disk is full"):
            encode(clip, tmp_path / "more.safetensors", **how)
        with pytest.raises(OutputError, match="the disk is full"):
            decode(latents, tmp_path / "out.mkv", codec="ffv1", **how)
    assert sorted(tmp_path.iterdir()) == before
