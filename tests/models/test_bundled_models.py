from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lowtide import ModelError
from lowtide.core.metrics import psnr_y
from lowtide.models import bundled, bundled_names, describe_bundled, load, lowtide_files
from lowtide.models.resample import resize_cubic

KINDS = ("lowtide", "lowtide-large", "lowtide-photo")
UPSCALERS = tuple(f"{kind}-x{scale}" for kind in KINDS for scale in (2, 4))
DENOISERS = ("lowtide-denoise", "lowtide-photo-denoise")


def test_names() -> None:
    assert bundled_names() == (*UPSCALERS, *DENOISERS)


@pytest.mark.parametrize("name", bundled_names())
def test_file_card_and_description(name: str) -> None:
    model, facts = load(name), describe_bundled(name)
    assert model.descriptor == facts
    assert facts.license == "MIT"
    entry = bundled.find_bundled(name)
    assert entry.path.stat().st_size < 4_000_000
    card = entry.model_card.read_text()
    assert facts.sha256 in card
    assert f"{facts.parameters:,} parameters" in card
    rows = [json.loads(line) for line in entry.path.with_suffix(".jsonl").read_text().splitlines()]
    assert rows[-1]["step"] >= (4000 if name in UPSCALERS else 1000)


@pytest.mark.parametrize("name", UPSCALERS)
def test_better_than_cubic(name: str) -> None:
    import skimage.data

    model = load(name)
    scale = model.descriptor.scale
    high = skimage.data.coffee()[: 400 // scale * scale, : 600 // scale * scale]
    low = resize_cubic(high, high.shape[0] // scale, high.shape[1] // scale)
    image = torch.from_numpy(low).permute(2, 0, 1)[None].float() / 255
    result = (model(image)[0] * 255).round().byte().permute(1, 2, 0).numpy()
    cubic = resize_cubic(low, *high.shape[:2])
    assert psnr_y(result, high, scale) > psnr_y(cubic, high, scale) + 1.0


@pytest.mark.parametrize("quality", [75, 40])
@pytest.mark.parametrize("scale", [2, 4])
def test_jpegs_are_enlarged_better_than_by_cubic_interpolation(scale: int, quality: int) -> None:
    """By the model for photographs as people have them; the others enlarge their blocks too."""
    import pyvips
    import skimage.data

    high = skimage.data.coffee()
    low = pyvips.Image.new_from_array(resize_cubic(high, 400 // scale, 600 // scale))
    file = low.jpegsave_buffer(Q=quality, subsample_mode="on")
    given = pyvips.Image.jpegload_buffer(file).numpy()
    image = torch.from_numpy(given).permute(2, 0, 1)[None].float() / 255

    def score(name: str) -> float:
        result = (load(name)(image)[0].clamp(0, 1) * 255).round().byte()
        return psnr_y(result.permute(1, 2, 0).numpy(), high, scale)

    cubic = psnr_y(resize_cubic(given, *high.shape[:2]), high, scale)
    assert score(f"lowtide-photo-x{scale}") > max(cubic, score(f"lowtide-large-x{scale}")) + 0.4


@pytest.mark.parametrize("sigma", [15, 50])
def test_removes_noise(sigma: int) -> None:
    """Of a photograph that it was not trained on, in color and in gray."""
    import skimage.data

    photo = skimage.data.coffee()[100:292, 200:392] / 255
    for clean in (photo, np.repeat(photo.mean(2, keepdims=True), 3, 2)):
        noise = np.random.default_rng(0).standard_normal(clean.shape)
        gray = (clean == clean[..., :1]).all()
        noisy = clean + (noise[..., :1] if gray else noise) * sigma / 255
        model = load("lowtide-denoise")
        model.module.set_level(sigma / 255)
        image = torch.from_numpy(noisy.astype(np.float32)).permute(2, 0, 1)[None]
        result = model(image)[0].permute(1, 2, 0).numpy()
        gain = np.log10(np.square(noisy - clean).mean() / np.square(result - clean).mean())
        assert 10 * gain > (5 if sigma == 15 else 8)


@pytest.mark.parametrize("name", UPSCALERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    image = torch.rand(1, 3, 20, 30)
    exact = load(name)(image)
    model = load(name).to(dtype=dtype, memory_format=torch.channels_last)
    error = (model(image.to(dtype)).float() - exact).abs().max()
    assert error < (0.004 if dtype == torch.float16 else 0.03)


def test_unknown_name() -> None:
    with pytest.raises(
        ModelError, match="the bundled models are lowtide-x2, lowtide-x4, "
    ) as caught:
        load("lowtide-x3")
    assert "lowtide-x" in (caught.value.hint or "")
    with pytest.raises(ModelError, match="no model 'zebra'"):
        describe_bundled("zebra")


def test_changed_file_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in bundled_names():
        shutil.copy(bundled.find_bundled(name).path, tmp_path)
    monkeypatch.setattr(bundled, "WEIGHTS", tmp_path)
    path = tmp_path / "lowtide-x2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not the released file"):
        load("lowtide-x2")
    path.unlink()
    with pytest.raises(ModelError, match="missing from the installation"):
        load("lowtide-x2")
    assert load("lowtide-x4").descriptor.scale == 4


def test_recognized_anywhere_by_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.safetensors"
    shutil.copy(bundled.find_bundled("lowtide-x2").path, path)
    model = load(str(path))
    assert model.descriptor.name == "elsewhere"
    assert model.descriptor.architecture == "ParagonConv"
    image = torch.rand(1, 3, 9, 8)
    assert torch.equal(model(image), load("lowtide-x2")(image))


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        ("ParagonVast", "{}", "does not know"),
        ("ParagonConv", "{", "damaged"),
        ("ParagonConv", "[]", "no configuration"),
        ("ParagonConv", '{"scale": 2}', "blocks, features"),
        ("ParagonConv", '{"scale": 5, "features": 4, "blocks": 1}', "not by 5"),
        ("ParagonConv", '{"scale": 2, "features": 4, "blocks": "1"}', "integers of at least 1"),
        ("ParagonConv", '{"scale": 2, "features": 4, "blocks": 1}', "do not fit"),
    ],
)
def test_wrong_metadata(tmp_path: Path, architecture: str, config: str, words: str) -> None:
    path = tmp_path / "model.safetensors"
    tensors = load_file(bundled.find_bundled("lowtide-x2").path)
    save_file(
        tensors, path, {lowtide_files.ARCHITECTURE: architecture, lowtide_files.CONFIG: config}
    )
    with pytest.raises(ModelError, match=words):
        load(path)


@pytest.mark.slow
def test_set5_benchmark(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's own code finds the figures that the model cards and the README may state."""
    import common  # pyright: ignore[reportMissingImports]
    import set5  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["set5.py", "--data", str(data)])
    set5.main()
    rows = json.loads((tmp_path / "set5.json").read_text())["rows"]
    found = {row["row"]: row["mean_db"] for row in rows}
    assert found["cubic x2"] == pytest.approx(33.66, abs=0.02)
    assert found["cubic x4"] == pytest.approx(28.42, abs=0.02)
    assert found["lowtide-x2"] >= 36.95
    assert found["lowtide-x4"] >= 30.6
    assert found["lowtide-large-x2"] >= 37.2
    assert found["lowtide-large-x4"] >= 31.0
    assert found["lowtide-large-x2, self-ensemble"] >= 37.4
    assert found["lowtide-large-x4, self-ensemble"] >= 31.2
    assert all(row["statement_holds"] for row in rows if "tiles" in row["row"])
