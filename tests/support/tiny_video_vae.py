"""A small `VideoVAE` with random weights, of which norms and biases are no default."""

import torch

from lowtide.models.video_vae import VideoVAE, VideoVAEConfig


def tiny_video_vae(seed=0, **changes):
    """Return the model in evaluation mode."""
    sizes = {
        "block_out_channels": (8, 8, 16, 16),
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    torch.manual_seed(seed)
    vae = VideoVAE(VideoVAEConfig.of(**{**sizes, **changes}))
    for name, one in vae.named_parameters():
        if one.dim() == 1:
            torch.nn.init.normal_(one, 1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    return vae.requires_grad_(False).eval()
