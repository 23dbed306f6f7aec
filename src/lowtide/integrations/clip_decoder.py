"""Decoders of clips: a video autoencoder of diffusers as modules with carried state.

A decoder with ``feat_cache`` keeps the last frames that each causal convolution has read, in order
of the calls. The first frame begins without them, and upsampling in time leaves it as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.errors import UsageError
from lowtide.memory.budget import Budget
from lowtide.streaming.chunk_stream import ChunkStream
from lowtide.streaming.engine.placement import PagePlacement

# Frames that a causal convolution with a kernel of 3 keeps.
_KEPT = 2
# Side of the trial latents that show what the decoder keeps.
_TRIAL_SIDE = 8
# Channels of a cache, and its sides as a multiple of those of the latents; None for no cache.
_CacheShape = tuple[int, int] | None


def is_clip_autoencoder(kind: type) -> bool:
    """Whether modules of a class decode clips chunk by chunk, in a way known here."""
    return kind.__name__ == "AutoencoderKLWan" and kind.__module__.startswith("diffusers.")


def check_clip_decoder(autoencoder: Any) -> None:
    """Raise `UsageError` for a form of the autoencoder that is not supported."""
    config = autoencoder.config
    if config.is_residual or config.patch_size is not None:
        raise UsageError(
            f"this {type(autoencoder).__name__} is of Wan 2.2 (is_residual, patch_size), whose"
            " shortcuts between frames cannot be decoded in bands yet"
        )


def clip_decoder(
    autoencoder: Any,
    *,
    budget: str | int | Budget = "auto",
    pages: PagePlacement = "auto",
    scratch: Path | None = None,
) -> ChunkStream:
    """Return the stream that decodes latents (B, C, T, H, W) to frames in -1..1.

    The latents are those after ``post_quant_conv``. Settings are those of `lowtide.stream`.
    """
    decoder = autoencoder.decoder
    autoencoder.clear_cache()  # makes one as well
    shapes = _cache_shapes(decoder, autoencoder.config.z_dim, len(autoencoder._feat_map))
    first, later = _FirstFrame(decoder, shapes).eval(), _LaterFrame(decoder, shapes).eval()
    return ChunkStream(first, later, budget=budget, pages=pages, scratch=scratch)


class _FirstFrame(nn.Module):
    """Decoder of the first latent, which fills up the caches with frames of zeros.

    They are what later convolutions pad with, where they find fewer frames.
    """

    def __init__(self, decoder: nn.Module, shapes: tuple[_CacheShape, ...]) -> None:
        super().__init__()
        self.decoder, self._shapes = decoder, shapes

    def forward(self, latent: Tensor) -> tuple[Tensor, ...]:
        """Return frames (1, 3, 1, H', W') and the caches after a latent (1, C, 1, H, W)."""
        caches: list[Any] = [None] * len(self._shapes)
        made = self.decoder(latent, feat_cache=caches, feat_idx=[0], first_chunk=True)
        state = []
        for cache, shape in zip(caches, self._shapes, strict=True):
            if isinstance(cache, Tensor):
                state.append(F.pad(cache, (0, 0, 0, 0, _KEPT - cache.shape[2], 0)))
            elif shape is not None:
                channels, scale = shape
                height, width = (side * scale for side in latent.shape[3:])
                state.append(latent.new_zeros(1, channels, _KEPT, height, width))
        return (made.clamp(-1, 1), *state)


class _LaterFrame(nn.Module):
    """Decoder of a later latent, with the caches as arguments and results."""

    def __init__(self, decoder: nn.Module, shapes: tuple[_CacheShape, ...]) -> None:
        super().__init__()
        self.decoder, self._shapes = decoder, shapes

    def forward(self, latent: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return frames (1, 3, 4, H', W') and the caches after a latent (1, C, 1, H, W)."""
        given = iter(state)
        caches = [None if shape is None else next(given) for shape in self._shapes]
        made = self.decoder(latent, feat_cache=caches, feat_idx=[0])
        return (made.clamp(-1, 1), *(one for one in caches if one is not None))


def _cache_shapes(decoder: nn.Module, channels: int, count: int) -> tuple[_CacheShape, ...]:
    """Return the shapes of the caches after two latents, by which all of them are there."""
    weight = next(decoder.parameters())
    caches: list[Any] = [None] * count
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        latent = torch.empty(
            1, channels, 1, _TRIAL_SIDE, _TRIAL_SIDE, dtype=weight.dtype, device=weight.device
        )
        for first in (True, False):
            decoder(latent, feat_cache=caches, feat_idx=[0], first_chunk=first)
    return tuple(
        (one.shape[1], one.shape[3] // _TRIAL_SIDE) if isinstance(one, Tensor) else None
        for one in caches
    )
