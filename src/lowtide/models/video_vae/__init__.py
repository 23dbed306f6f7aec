"""Video autoencoder of SeedVR2's shape: 8 pixels and 4 frames to a latent, along each axis.

`VideoVAEConfig` has its sizes, `VideoVAE` is the model, which is loaded on first use: sizes alone
need no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.models.video_vae.config import VideoVAEConfig

if TYPE_CHECKING:
    from lowtide.models.video_vae.video_vae import VideoVAE

__all__ = ["VideoVAE", "VideoVAEConfig"]


def __getattr__(name: str) -> Any:
    if name != "VideoVAE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lowtide.models.video_vae.video_vae import VideoVAE

    return VideoVAE
