"""`lowtide vae` on the command line."""

import json

import pytest

pytest.importorskip("av")

from support.tiny_video_vae import tiny_video_vae
from support.video_clips import Clip


def test_vae(lowtide, tmp_path):
    clip = Clip(frames=1, width=32, height=24).write(tmp_path / "in.mkv")
    tiny_video_vae(block_out_channels=(8, 8, 8, 8)).save(tmp_path / "vae")
    more = "-m", tmp_path / "vae", "-b", "256MiB"
    latents, target = tmp_path / "l.safetensors", tmp_path / "out.mp4"
    done = lowtide("vae", "encode", clip, "-o", latents, *more, "--json", "--report").json
    (made,) = done["clips"]
    assert made["status"] == "done" and made["latents"] == [4, 1, 3, 4]
    sidecar = json.loads((tmp_path / "l.safetensors.lowtide.json").read_text())
    assert sidecar["clip"] == made
    assert lowtide("vae", "encode", clip, "-o", latents, *more).code == 2
    planned = lowtide("vae", "decode", latents, "-o", target, *more, "--dry-run")
    assert planned.code == 0 and not target.exists()
    assert "1 latents of 4×3×4 → 1 frames of 32×24" in planned.out
    assert "decoder    chunks: 1, alone; streamed" in planned.out
    both = lowtide("vae", "roundtrip", clip, *more)
    assert both.code == 0 and "PSNR" in both.out and "SSIM" in both.out
    assert (
        lowtide("vae", "decode", latents, "-o", tmp_path / "2.mp4", *more[:2], "-b", "2MiB").code
        == 3
    )
    assert lowtide("vae", "decode", latents, "-o", target, *more, "--sample").code == 2


def test_plan_vae(lowtide, tmp_path):
    tiny_video_vae(block_out_channels=(8, 8, 8, 8)).save(tmp_path / "vae")
    asked = "plan", "vae", "-m", tmp_path / "vae", "--size", "64x48", "--frames", 5
    asked += "--device", "rtx4060-8gb", "--part", "decoder"
    done = lowtide(*asked)
    assert done.code == 0
    assert "5 frames of 64×48" in done.out and "not verified" in done.out
    assert lowtide(*asked, "--json").json["parts"][0]["state"] == "memory"
    assert lowtide(*asked, "-b", "400MiB").code == 3
    assert lowtide(*asked, "--size", "64").code == 2
