"""The mean over eight views equals that of eight runs, whole and in tiles."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lowtide
from lowtide.cli.main import app
from lowtide.jobs.images.build_network import build_network, ensemble_network
from lowtide.models.loaded_model import SelfEnsemble, as_ensemble


class _Uneven(nn.Module):
    """Enlarges by 2, and differently in every direction."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, (3, 5), padding=(1, 2))

    def forward(self, image):
        return nn.functional.pixel_shuffle(self.conv(image), 2)


def _views(image):
    for turned in (False, True):
        for mirrored in (False, True):
            for upside in (False, True):
                view = image.rot90(1, (2, 3)) if turned else image
                view = view.flip(3) if mirrored else view
                yield view.flip(2) if upside else view, (turned, mirrored, upside)


def _back(result, turned, mirrored, upside):
    result = result.flip(2) if upside else result
    result = result.flip(3) if mirrored else result
    return result.rot90(-1, (2, 3)) if turned else result


@pytest.mark.parametrize("size", [(7, 12), (9, 9), (1, 5)])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_is_the_mean_of_the_eight_views_put_back(size, order):
    torch.manual_seed(0)
    body = _Uneven().double()
    image = torch.rand(2, 3, *size, dtype=torch.float64).contiguous(memory_format=order)
    with torch.no_grad():
        expected = sum(_back(body(view), *how) for view, how in _views(image)) / 8
        found = SelfEnsemble(body)(image)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_costs_are_not_those_of_the_model_alone():
    facts = lowtide.load("lowtide-x2").descriptor
    assert as_ensemble(facts).sha256 != facts.sha256
    assert as_ensemble(facts).scale == facts.scale


def test_the_fp32_reference_of_half_precision_is_an_ensemble_too():
    network = ensemble_network(build_network(lowtide.load("lowtide-x2"), "cpu", "bf16"))
    image = torch.rand(1, 3, 24, 31, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = SelfEnsemble(lowtide.load("lowtide-x2").module)(image)
        exact, low = network.make_fp32_forward()(image), network.forward(image)
    torch.testing.assert_close(exact, expected)
    assert 0 < (low - expected).abs().max() < 0.02


@pytest.mark.slow
def test_the_command_plans_for_the_ensemble(tmp_path, save, photo):
    source = str(save(tmp_path / "photo.png", photo[:40, :50]))
    words = ["upscale", source, "--dry-run", "--json", "-b", "1GiB"]
    plain, eight = (
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout)["images"][0]["plan"]
        for more in ([], ["--self-ensemble"])
    )
    assert plain["model_sha256"] != eight["model_sha256"]


@pytest.mark.slow
def test_an_image_in_tiles_is_that_of_the_whole(tmp_path, save, photo):
    source = save(tmp_path / "photo.png", photo[:97, :131])
    reports = {}
    for strategy in ("whole", "tiled"):
        made = lowtide.upscale(
            source,
            tmp_path / f"{strategy}.png",
            self_ensemble=True,
            strategy=strategy,
            accuracy="exact",
            **({"tile": 64} if strategy == "tiled" else {}),
        )
        reports[strategy] = made.images[0]
    pictures = [_read(tmp_path / f"{strategy}.png").astype(int) for strategy in ("whole", "tiled")]
    assert np.abs(pictures[0] - pictures[1]).max() <= 1
    assert reports["tiled"].plan.strategy.tiles > 1
    model = lowtide.load("lowtide-x2")
    image = torch.from_numpy(photo[:97, :131].copy()).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        whole = SelfEnsemble(model.module)(image).clamp(0, 1)
    expected = (whole[0] * 255).round().permute(1, 2, 0).numpy()
    assert np.abs(pictures[0] - expected).max() <= 1
    # It is not what the model says when it is asked once.
    plain = tmp_path / "plain.png"
    lowtide.upscale(source, plain)
    assert (_read(plain) != pictures[0]).any()


def _read(path):
    import pyvips

    return pyvips.Image.new_from_file(str(path)).numpy()
