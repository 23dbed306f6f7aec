"""Autoencoders of diffusers small enough to be run many times, with random weights."""

from copy import deepcopy

import torch
from diffusers import AutoencoderKL

KL = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
}

DC = {
    "attention_head_dim": 2,
    "latent_channels": 4,
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
} | {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {
        "block_types": ("ResBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 8),
        "qkv_multiscales": ((), (5,)),
        "layers_per_block": (1, 1),
    }.items()
}
TINY = {
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "num_encoder_blocks": (1, 1),
    "num_decoder_blocks": (1, 1),
    "upsampling_scaling_factor": 2,
}


def built(kind, **config):
    """An autoencoder for results, not for training: always the same numbers."""
    torch.manual_seed(0)
    return kind(**config).eval()


def small_vae(**changes):
    """One that is captured soon: a level, no attention."""
    least = {
        "block_out_channels": (8,),
        "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",),
        "mid_block_add_attention": False,
    }
    return built(AutoencoderKL, **{**KL, **least, **changes})


def halved(module):
    """A copy with other weights."""
    other = deepcopy(module)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.5)
    return other


def pictures():
    return torch.rand(1, 3, 24, 20, generator=torch.Generator().manual_seed(1)) * 2 - 1


def latents():
    return torch.randn(1, 4, 12, 10, generator=torch.Generator().manual_seed(2))


def decoded(vae):
    with torch.no_grad():
        return vae.decode(latents()).sample


def encoded(vae):
    with torch.no_grad():
        return vae.encode(pictures()).latent_dist.parameters


def same(result, wanted):
    """Equal to rounding."""
    return (result - wanted).abs().max() <= 1e-5 * wanted.abs().max()
