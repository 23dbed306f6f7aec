"""`lowtide denoise` on the command line."""

import json

import numpy as np
import pytest

from support.denoiser_files import denoiser_file


def test_denoise(lowtide, photo, tmp_path, save):
    noise = np.random.default_rng(0).normal(0, 25, (50, 60, 3))
    noisy = np.rint((photo[100:150, 200:260] + noise).clip(0, 255)).astype(np.uint8)
    source, target = save(tmp_path / "in.png", noisy), tmp_path / "out.png"
    weights = denoiser_file(tmp_path / "small.safetensors")
    words = ("denoise", source, "-m", weights, "-b", "256MiB")
    (image,) = lowtide(*words, "--dry-run", "--json").json["images"]
    assert (image["status"], image["sigma_source"]) == ("planned", "estimated")
    assert image["sigma"] == pytest.approx(25, rel=0.25) and not target.exists()
    done = lowtide(*words, "-o", target, "--sigma", 20, "--report")
    assert done.code == 0 and "sigma 20.0 of 255, given" in done.out and target.exists()
    sidecar = json.loads((tmp_path / "out.png.lowtide.json").read_text())
    assert sidecar["image"]["sigma"] == 20 and sidecar["model"]["noise"].startswith("gaussian")
    refused = lowtide(*words, "-o", target)
    assert refused.code == 2 and "--force" in refused.err
    assert lowtide(*words).code == 2
    assert lowtide(*words, "-o", target, "--force", "--scheduler", "ddpm", "--steps", 2).code == 0
    words += "-o", target, "--force", "--preview", "5,6,30,20"
    some = lowtide(*words, "--strength", 0.5, "--chroma-only", "--mask", source)
    assert f"strength 0.5; colors alone; where {source} is white; a preview of 30×20" in some.out
    assert "control" in some.out and "30×20 → 30×20" in some.out
    (image,) = lowtide(*words, "--strength", 0.5, "--json").json["images"]
    assert (image["strength"], image["preview"]) == (0.5, [5, 6, 30, 20])
    described = lowtide("models", weights, "--json").json["models"][0]
    assert described["noise"] == "gaussian, up to a sigma of 60 of 255"


def test_scores_in_text_and_json(lowtide, photo, tmp_path, save):
    clean = photo[100:150, 200:260]
    noise = np.random.default_rng(0).normal(0, 25, clean.shape)
    noisy = np.rint((clean + noise).clip(0, 255)).astype(np.uint8)
    source, truth = save(tmp_path / "in.png", noisy), save(tmp_path / "truth.png", clean)
    weights = denoiser_file(tmp_path / "small.safetensors")
    words = ("denoise", source, "-m", weights, "-b", "256MiB", "--reference", truth, "--force")
    done = lowtide(*words, "-o", tmp_path / "out.png")
    assert "raw, against" in done.out and "brightness-aligned (gains" in done.out
    words += "-o", tmp_path / "out.png", "--json", "--comparison", tmp_path / "picture.png"
    (image,) = lowtide(*words).json["images"]
    scores = image["scores"]["noisy"]
    assert scores["raw"]["psnr_db"] == pytest.approx(20.5, abs=1)
    assert scores["aligned"].keys() == {"psnr_db", "ssim"} and scores["gain"] > 0.9
    assert (tmp_path / "picture.png").exists()
