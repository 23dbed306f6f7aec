"""Exports in 8 bits: smaller, and near fp32 on other photographs than they were tuned on."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide import ImageError, InputError, ModelError, UsageError
from lowtide.core.metrics import psnr
from lowtide.jobs.export import calibration_images
from lowtide.jobs.export import command as job
from lowtide.jobs.export.command import export_onnx
from lowtide.models import Model, SizeRule

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture
def photos(tmp_path, save, photo):
    """Three pictures of one photograph, of different sizes and sample types."""
    folder = tmp_path / "photos"
    save(folder / "a.png", photo[:150, :320])
    save(folder / "b.png", photo[150:290, :300].astype(np.uint16) * 257)
    save(folder / "c.jpg", photo[290:, :299])
    return folder


def nodes(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def test_smaller_and_near(tmp_path, photos, photo):
    target = tmp_path / "model.onnx"
    messages = []
    report = export_onnx(
        "lowtide-x2", target, precision="int8", calibrate=[photos], progress=messages.append
    )
    assert [step.split()[0] for step in messages] == [
        "tracing",
        "simplifying",
        "calibrating",
        "comparing",
    ]
    fp32 = export_onnx("lowtide-x2", tmp_path / "whole.onnx")
    assert report.file_bytes < fp32.file_bytes / 2
    assert [one.bound for one in report.sizes] == [None] * 4
    assert all(one.psnr_db > 45 and one.min_psnr_db == 40 for one in report.sizes)
    assert "dB on a photograph" in str(report)
    kinds = nodes(target)
    # All but the first and the last convolution take and give 8 bits.
    assert kinds.count("QuantizeLinear") == 2 * (kinds.count("Conv") - 2) > 0
    said = {one.key: one.value for one in onnx.load(target).metadata_props}
    assert (said["lowtide.precision"], said["lowtide.checked"]) == ("int8", "yes")
    # On what it was neither tuned nor checked on, and of another size.
    image = torch.from_numpy(photo[200:263, 300:401] / np.float32(255)).permute(2, 0, 1)[None]
    found, expected = (lowtide.load(model)(image).numpy() for model in (target, "lowtide-x2"))
    assert psnr(found, expected) > 42
    assert lowtide.load(target).descriptor.tags[-1] == "int8"


def test_the_same_each_time(tmp_path, photos):
    for name in ("one", "two"):
        export_onnx(
            "lowtide-x2", tmp_path / f"{name}.onnx", precision="int8", calibrate=[photos / "a.png"]
        )
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


@pytest.mark.parametrize(
    ("count", "words"), [(1, "only 1 photograph"), (3, "3 photographs"), (4, "")]
)
def test_few_photographs_are_noted(tmp_path, save, photo, count, words):
    for place in range(count):
        save(tmp_path / "photos" / f"{place}.png", photo[:150, 90 * place : 90 * place + 200])
    report = export_onnx(
        "lowtide-x2", tmp_path / "a.onnx", precision="int8", calibrate=[tmp_path / "photos"]
    )
    assert bool(report.notes) == (count < 4)
    assert words in "".join(report.notes)
    assert all(f"note       {note}" in str(report) for note in report.notes)


def test_calibration_images_do_not_measure(photos, photo):
    model, paths = lowtide.load("lowtide-x2"), calibration_images.find_photographs([photos])
    assert [path.name for path in paths] == ["a.png", "b.png", "c.jpg"]
    given = torch.from_numpy(photo / np.float32(255)).permute(2, 0, 1)
    tuned = calibration_images.calibration_crops(paths[:2], model)
    assert [tuple(one.shape) for one in tuned] == [(1, 3, 128, 128)] * 2
    # Next to each other in the middle of the first image.
    torch.testing.assert_close(tuned[0][0], given[:, 11:139, 16:144], rtol=0, atol=1e-6)
    torch.testing.assert_close(tuned[1][0], given[:, 11:139, 176:304], rtol=0, atol=1e-6)
    (measured,) = calibration_images.evaluation_crops(paths[:2], model, [(129, 131)])
    torch.testing.assert_close(measured[0], given[:, 155:284, 85:216], rtol=0, atol=1e-6)


def test_halves_of_a_single_photograph(photos, photo):
    model, given = lowtide.load("lowtide-x2"), torch.from_numpy(photo / np.float32(255))
    (upper, *_), lower = (
        calibration_images.calibration_crops([photos / "a.png"], model),
        calibration_images.evaluation_crops([photos / "a.png"], model, [(50, 33), (500, 500)]),
    )
    assert upper.shape == (1, 3, 75, 128)
    torch.testing.assert_close(upper[0, 0], given[:75, 16:144, 0], rtol=0, atol=1e-6)
    assert [tuple(one.shape[2:]) for one in lower] == [(50, 33), (75, 320)]
    torch.testing.assert_close(lower[1][0, 0], given[75:150, :320, 0], rtol=0, atol=1e-6)


def test_gray_and_color(tmp_path, save, photo):
    gray, color = tmp_path / "gray.png", tmp_path / "color.png"
    save(gray, photo[:130, :130, :1])
    save(color, photo[:130, :130])
    facts = lowtide.load("lowtide-x2").descriptor
    for channels in (1, 3):
        network = nn.Conv2d(channels, channels, 1)
        model = Model(network, replace(facts, in_channels=channels, out_channels=channels))
        for path in (gray, color):
            (piece,) = calibration_images.calibration_crops([path, path], model)
            assert piece.shape == (1, channels, 128, 128)
            wanted = photo[1:129, 1:129, :1] if path == gray else photo[1:129, 1:129]
            assert piece.mean().item() == pytest.approx(wanted.mean() / 255, abs=1e-3)


def test_sizes_that_the_model_takes(photos):
    facts = lowtide.load("lowtide-x2").descriptor
    model = Model(nn.Conv2d(3, 3, 1), replace(facts, size=SizeRule(64, 16)))
    (piece,) = calibration_images.evaluation_crops([photos / "a.png"], model, [(129, 131)])
    assert piece.shape == (1, 3, 64, 128)
    large = Model(nn.Conv2d(3, 3, 1), replace(facts, size=SizeRule(128)))
    with pytest.raises(ImageError, match=r"a\.png: too small"):
        calibration_images.calibration_crops([photos / "a.png"], large)


def test_a_file_that_loses_too_much_is_not_kept(tmp_path, photos, monkeypatch):
    # Calibrated on darkness: all brighter values are clipped to one.
    monkeypatch.setattr(
        job.calibration_images,
        "calibration_crops",
        lambda paths, model: [torch.zeros(1, 3, 64, 64)],
    )
    with pytest.raises(
        ModelError, match=r"PSNR against PyTorch in fp32 is \d+\.\d dB, less than 40 dB"
    ):
        export_onnx("lowtide-x2", tmp_path / "x.onnx", precision="int8", calibrate=[photos])
    assert not list(tmp_path.glob("*.onnx*"))


def test_wrong_options(tmp_path, photos):
    target = tmp_path / "x.onnx"
    with pytest.raises(UsageError, match="none is given") as caught:
        export_onnx("lowtide-x2", target, precision="int8")
    assert "--calibrate" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="fp16 is not calibrated"):
        export_onnx("lowtide-x2", target, precision="fp16", calibrate=[photos])
    with pytest.raises(InputError, match="no such file"):
        export_onnx("lowtide-x2", target, precision="int8", calibrate=[tmp_path / "none"])
    with pytest.raises(UsageError, match="--precision int4 is not one of 'fp32', "):
        export_onnx("lowtide-x2", target, precision="int4")
    assert not target.exists()
