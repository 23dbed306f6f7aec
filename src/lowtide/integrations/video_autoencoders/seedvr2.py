"""Lowtide's own video autoencoder of SeedVR2's shape: its state is arguments and results already.

The first frame of a clip is a chunk of its own. A later chunk is one latent, or four frames.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowtide.integrations.video_autoencoders.clip_part import ClipPart

CLASSES = ("VideoVAE",)

_ENCODER_FRAMES, _DECODER_FRAMES = (1, 4), (1, 1)


def check(autoencoder: Any) -> None:
    """Accept any sizes."""


def networks(autoencoder: Any, part: str) -> dict[str, nn.Module]:
    """Return the submodule, by name, that ``part`` ("encoder" or "decoder") calls."""
    return {part: getattr(autoencoder, part)}


def clear_caches(autoencoder: Any) -> None:
    """Do nothing: the module keeps no cache."""


def encoder(autoencoder: Any) -> ClipPart:
    """Return the part that maps frames in -1..1 to the mean and log variance of latents."""
    chunk = _Chunk(autoencoder.encoder)
    return ClipPart(chunk, chunk, _ENCODER_FRAMES)


def decoder(autoencoder: Any) -> ClipPart:
    """Return the part that maps latents (B, C, n, h, w) to frames in about -1..1."""
    chunk = _Chunk(autoencoder.decoder)
    return ClipPart(chunk, chunk, _DECODER_FRAMES)


class _Chunk(nn.Module):
    """Encoder or decoder of one chunk; without a state it is the first one."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.training = False

    def forward(self, chunk: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the result and the state after a chunk (1, C, T, H, W)."""
        made, after = self.network.run_slice(chunk, state or None)
        return (made, *after)
