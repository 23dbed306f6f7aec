from __future__ import annotations

import numpy as np
import pytest
import torch

from lowtide import ModelError
from lowtide.models.paragonsr2.config import SCALES, ParagonConvConfig
from lowtide.models.paragonsr2.paragon_conv import ParagonConv
from lowtide.models.resample import resize_cubic


def _random(scale: int, blocks: int = 2) -> ParagonConv:
    torch.manual_seed(scale)
    model = ParagonConv(ParagonConvConfig(scale, features=6, blocks=blocks)).eval()
    torch.nn.init.normal_(model.conv_up.weight, std=0.1)
    return model.requires_grad_(False)


@pytest.mark.parametrize("scale", SCALES)
def test_untrained_is_cubic(scale: int) -> None:
    model = ParagonConv(ParagonConvConfig(scale, features=4, blocks=1))
    image = np.random.default_rng(0).random((12, 15, 3))
    given = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        result = model(given)[0].permute(1, 2, 0).numpy()
    expected = resize_cubic(image, 12 * scale, 15 * scale)
    inner = slice(2 * scale, -2 * scale)
    # Borders differ on purpose: replicated here, mirrored in MATLAB.
    assert result[inner, inner] == pytest.approx(expected[inner, inner], abs=2e-6)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("blocks", [1, 4])
def test_reach_is_what_the_configuration_says(scale: int, blocks: int) -> None:
    model = _random(scale, blocks)
    reach, middle = model.config.reach, 12
    image = torch.rand(1, 3, 25, 25, requires_grad=True)
    center = model(image)[..., middle * scale : (middle + 1) * scale, middle * scale].sum()
    (gradient,) = torch.autograd.grad(center, image)
    touched = gradient[0].abs().sum(dim=(0, 2)).nonzero()[:, 0]
    assert (int(touched.min()), int(touched.max())) == (middle - reach, middle + reach)


@pytest.mark.parametrize("scale", SCALES)
def test_crops_agree_with_the_whole(scale: int) -> None:
    model, image = _random(scale).double(), torch.rand(1, 3, 40, 33, dtype=torch.float64)
    reach = model.config.reach
    whole = model(image)
    for top in (3, 7, 18):
        part = model(image[:, :, top : top + 15])
        inner = part[:, :, reach * scale : -reach * scale]
        start = (top + reach) * scale
        assert torch.allclose(inner, whole[:, :, start : start + inner.shape[2]], atol=1e-12)


@pytest.mark.grid(3)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (2, 3)])
def test_tiny_images(scale: int, size: tuple[int, int]) -> None:
    result = _random(scale)(torch.rand(2, 3, *size))
    assert result.shape == (2, 3, size[0] * scale, size[1] * scale)
    assert bool(result.isfinite().all())


def test_layout_and_bfloat16() -> None:
    model, image = _random(4), torch.rand(1, 3, 20, 21)
    expected = model(image)
    model = model.to(memory_format=torch.channels_last)
    assert torch.allclose(model(image), expected, atol=1e-5)
    assert (model.bfloat16()(image.bfloat16()).float() - expected).abs().max() < 0.1


def test_exports_with_free_sizes() -> None:
    model, image = _random(2), torch.rand(1, 3, 20, 24)
    sides = {2: torch.export.Dim("rows", min=8, max=4096), 3: torch.export.Dim("columns", max=4096)}
    program = torch.export.export(model, (image,), dynamic_shapes=(sides,))
    other = torch.rand(1, 3, 31, 17)
    assert torch.allclose(program.module()(other), model(other), atol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_counts(scale: int) -> None:
    config = ParagonConvConfig(scale, features=7, blocks=3)
    model = ParagonConv(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters
    assert sum(buffer.numel() for buffer in model.buffers()) == config.buffer_elements
    assert "base.kernel" not in model.state_dict()


def test_configuration() -> None:
    config = ParagonConvConfig(4, 8, 2)
    assert ParagonConvConfig.from_dict(config.to_dict()) == config
    for values in ((5, 8, 2), (2, 0, 2), (2, 8, 0), (True, 8, 2)):
        with pytest.raises(ModelError):
            ParagonConvConfig(*values)
    with pytest.raises(ModelError, match="depth"):
        ParagonConvConfig.from_dict({**config.to_dict(), "depth": 1})
