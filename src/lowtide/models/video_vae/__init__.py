"""Video autoencoder of SeedVR2's shape: 8 pixels and 4 frames to a latent, along each axis.

`VideoVAEConfig` has its sizes, `VideoVAE` is the model, which is loaded on first use: sizes alone
need no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.models.families import ModelFamily
from lowtide.models.video_vae.config import CLASS_NAME, VideoVAEConfig

if TYPE_CHECKING:
    from lowtide.models.video_vae.video_vae import VideoVAE

__all__ = ["VideoVAE", "VideoVAEConfig"]

FAMILY = ModelFamily(name=CLASS_NAME, command="lowtide vae encode VIDEO -o LATENTS -m MODEL")


def __getattr__(name: str) -> Any:
    if name != "VideoVAE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lowtide.models.video_vae.video_vae import VideoVAE

    return VideoVAE
