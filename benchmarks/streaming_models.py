"""Models that are streamed by the benchmarks: full depth, fixed weights, inputs of any size."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Part(nn.Module):
    """One direction of an autoencoder."""

    def __init__(self, direction: str) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        self.vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=4,
            norm_num_groups=32,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
        self.direction = direction

    def forward(self, image: Tensor) -> Tensor:
        """Latents to an image, or an image to the parameters of its latents."""
        if self.direction == "decode":
            return self.vae.decode(image).sample
        return self.vae.encode(image).latent_dist.parameters


def spandrel_class(family: str, arch: str, name: str, **options: Any) -> nn.Module:
    """One of spandrel's networks, with random weights."""
    home = importlib.import_module(f"spandrel.architectures.{family}.{arch}")
    return getattr(home, name)(**options)


_SWIN = {
    "upscale": 4,
    "img_size": 64,
    "depths": [6] * 6,
    "num_heads": [6] * 6,
    "embed_dim": 180,
    "mlp_ratio": 2,
    "img_range": 1.0,
    "upsampler": "pixelshuffle",
    "resi_connection": "1conv",
}


def _craft() -> nn.Module:
    # As spandrel loads it: a model of Lowtide's has faster parts.
    from spandrel import ModelLoader

    path = Path(os.environ["LOWTIDE_DATA"]) / "models" / "craft_x4.pth"
    return ModelLoader(device="cpu").load_from_file(path).model


def _span() -> nn.Module:
    from lowtide.models.spandrel_files import fold_convs

    return fold_convs(
        spandrel_class(
            "SPAN", "__arch.span", "SPAN", num_in_ch=3, num_out_ch=3, feature_channels=48, upscale=2
        ).eval()
    )


def _span_to_unit() -> nn.Module:
    # It multiplies what it is given by 255 and leaves the way back to its last layer, whose random
    # weights know nothing of that.
    network = _span()
    for weight in network.upsampler[0].parameters():
        weight.data.div_(255)
    return network


MODELS: dict[str, Callable[[], nn.Module]] = {
    "VAE decode": lambda: Part("decode"),
    "VAE encode": lambda: Part("encode"),
    "CRAFT": _craft,
    "SwinIR": lambda: spandrel_class("SwinIR", "__arch.SwinIR", "SwinIR", **_SWIN, window_size=8),
    "HAT": lambda: spandrel_class(
        "HAT",
        "__arch.HAT",
        "HAT",
        **_SWIN,
        window_size=16,
        compress_ratio=3,
        squeeze_factor=30,
        conv_scale=0.01,
        overlap_ratio=0.5,
    ),
    "DRCT": lambda: spandrel_class(
        "DRCT", "__arch.drct_arch", "DRCT", **_SWIN, window_size=16, gc=32
    ),
    "DRCT-L": lambda: spandrel_class(
        "DRCT",
        "__arch.drct_arch",
        "DRCT",
        **{**_SWIN, "depths": [6] * 12, "num_heads": [6] * 12},
        window_size=16,
        gc=32,
    ),
    "RRDB": lambda: spandrel_class(
        "ESRGAN",
        "__arch.RRDB",
        "RRDBNet",
        in_nc=3,
        out_nc=3,
        num_filters=64,
        num_blocks=23,
        scale=4,
    ),
    "SPAN": _span,
    "SPAN to 0..1": _span_to_unit,
    "Compact": lambda: spandrel_class(
        "Compact", "__arch.SRVGG", "SRVGGNetCompact", num_feat=64, num_conv=16, upscale=2
    ),
    "PLKSR": lambda: spandrel_class(
        "PLKSR", "__arch.PLKSR", "PLKSR", dim=64, n_blocks=28, upscaling_factor=2
    ),
}


# At the end of a name: the model and its input in that precision.
HALF = " bf16"


def made(name: str) -> nn.Module:
    """A model with the same weights each time; biases and norms are not 0 and 1."""
    if name.endswith(HALF):
        return made(name.removesuffix(HALF)).to(torch.bfloat16)
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    if name != "CRAFT":  # which is trained
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape) * 0.02)
    return model


def given(name: str, height: int, width: int, seed: int = 1) -> Tensor:
    """The input whose result, or which itself for upscalers and encoders, is of this size."""
    if name.endswith(HALF):
        return given(name.removesuffix(HALF), height, width, seed).to(torch.bfloat16)
    torch.manual_seed(seed)
    if name == "VAE decode":
        return torch.randn(1, 4, height // 8, width // 8)
    # Smooth, as photographs are.
    noise = torch.rand(1, 3, height // 8, width // 8)
    return nn.functional.interpolate(noise, (height, width), mode="bicubic").clamp(0, 1)
