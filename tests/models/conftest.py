"""Real model files, made from small networks with random weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

Writer = Callable[[nn.Module, str], Path]


def _network(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "compact":
        from spandrel.architectures.Compact import Compact

        return Compact(num_feat=8, num_conv=2, upscale=2)
    if name == "span":
        from spandrel.architectures.SPAN import SPAN

        return SPAN(num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=3)
    if name == "swinir":
        from spandrel.architectures.SwinIR import SwinIR

        return SwinIR(
            img_size=16,
            embed_dim=12,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=8,
            mlp_ratio=2,
            upscale=2,
            upsampler="pixelshuffledirect",
        )
    if name == "esrgan":
        from spandrel.architectures.ESRGAN import ESRGAN

        # Its shuffled input gives it a size rule: a multiple of 4.
        return ESRGAN(in_nc=12, num_filters=8, num_blocks=1, scale=4, plus=False, shuffle_factor=2)
    from spandrel.architectures.DnCNN import DnCNN

    # Gray plus a noise level that spandrel adds in its call.
    return DnCNN(in_nc=2, out_nc=1, nc=8, nb=8, act_mode="R", mode="FDnCNN")


@pytest.fixture(scope="session")
def network() -> Callable[[str], nn.Module]:
    """Small networks by name: compact, span, swinir, esrgan, dncnn."""
    return _network


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Save a network's weights under a file name; the suffix chooses the format."""

    def writer(module: nn.Module, name: str) -> Path:
        path = tmp_path / name
        if path.suffix == ".safetensors":
            save_file(module.state_dict(), path)
        else:
            torch.save({"params": module.state_dict()}, path)
        return path

    return writer


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real test data, which is not part of the project."""
    shared = Path(__file__).parents[3] / "shared" / "data"
    for folder in (os.environ.get("LOWTIDE_DATA"), shared):
        if folder and Path(folder).is_dir():
            return Path(folder)
    pytest.skip("real test data is absent; set LOWTIDE_DATA to its folder")
