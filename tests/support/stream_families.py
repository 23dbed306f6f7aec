"""One small model of each family that is streamed."""

import importlib
from dataclasses import replace

import torch
from torch import nn

from lowtide.models.paragonsr2.config import TierConfig
from lowtide.models.paragonsr2.tiers import ParagonTier
from lowtide.models.spandrel_files import fold_convs


def spandrel(family, arch, name, **options):
    home = importlib.import_module(f"spandrel.architectures.{family}.{arch}")
    return getattr(home, name)(**options)


SWIN = {
    "upscale": 2,
    "img_size": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "embed_dim": 12,
    "mlp_ratio": 2,
    "img_range": 1.0,
    "upsampler": "pixelshuffle",
    "resi_connection": "1conv",
}


FAMILIES = {
    "Compact": lambda: spandrel(
        "Compact", "__arch.SRVGG", "SRVGGNetCompact", num_feat=8, num_conv=4, upscale=2
    ),
    "ESRGAN": lambda: spandrel(
        "ESRGAN", "__arch.RRDB", "RRDBNet", in_nc=3, out_nc=3, num_filters=8, num_blocks=2, scale=4
    ),
    "PLKSR": lambda: spandrel(
        "PLKSR", "__arch.PLKSR", "PLKSR", dim=16, n_blocks=2, upscaling_factor=2
    ),
    "SPAN": lambda: fold_convs(
        spandrel(
            "SPAN", "__arch.span", "SPAN", num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=2
        ).eval()
    ),
    "RCAN": lambda: spandrel(
        "RCAN", "__arch.rcan_arch", "RCAN", n_resgroups=2, n_resblocks=2, n_feats=16, scale=2
    ),
    "SwinIR": lambda: spandrel("SwinIR", "__arch.SwinIR", "SwinIR", **SWIN, window_size=8),
    "HAT": lambda: spandrel(
        "HAT",
        "__arch.HAT",
        "HAT",
        **SWIN,
        window_size=8,
        compress_ratio=3,
        squeeze_factor=4,
        conv_scale=0.01,
        overlap_ratio=0.5,
    ),
    "DRCT": lambda: spandrel(
        "DRCT",
        "__arch.drct_arch",
        "DRCT",
        **{**SWIN, "depths": [6], "num_heads": [2]},
        window_size=8,
        gc=8,
    ),
    # Windows that go round the image without a mask; a dictionary and a mean over the image.
    **{
        f"ParagonSR2 {tier}": lambda tier=tier: ParagonTier(
            replace(TierConfig.of(tier, 2), features=16, groups=1, blocks=2, window=8)
        )
        for tier in ("stream", "photo", "pro")
    },
}


def rolled(module):
    """Weights that leave nothing at 0 or 1, as trained ones do."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight += torch.randn(weight.shape, generator=generator) * 0.05
    return module


class Part(nn.Module):
    """One method of a module as a call of its own."""

    def __init__(self, module, call):
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, image):
        return self.call(self.module, image)


def autoencoder():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )


def tiny():
    from diffusers import AutoencoderTiny

    return AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
        latent_channels=4,
    )


def denoiser():
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
    )


AUTOENCODERS = {
    "decoder": (autoencoder, lambda vae, x: vae.decode(x).sample, 4),
    "encoder": (autoencoder, lambda vae, x: vae.encode(x).latent_dist.parameters, 3),
    "tiny decoder": (tiny, lambda vae, x: vae.decode(x).sample, 4),
    "tiny encoder": (tiny, lambda vae, x: vae.encode(x).latents, 3),
    "U-Net": (denoiser, lambda net, x: net(x, 7).sample, 3),
}
