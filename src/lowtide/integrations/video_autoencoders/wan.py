"""Wan's video autoencoder and its copies: caches of causal convolutions as carried state.

Encoder and decoder take a list ``feat_cache``: the last frames that each causal convolution has
read, in order of the calls. The first chunk is one frame, which begins without them; resampling in
time leaves it as it is. Later chunks of the encoder have four frames, those of the decoder one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.errors import UsageError
from lowtide.integrations.video_autoencoders.clip_part import ClipPart
from lowtide.memory.tracing.python_places import PythonStatePlaces

CLASSES = ("AutoencoderKLWan", "AutoencoderKLQwenImage")

_ENCODER_FRAMES, _DECODER_FRAMES = (1, 4), (1, 1)
# Side of the trial frames that show what is kept.
_TRIAL_SIDE = 64
# Channels and frames of a cache, and its sides as a multiple of those of the input (0 where it has
# fewer rows); None for no cache.
_CacheShape = tuple[int, int, int] | None


def check(autoencoder: Any) -> None:
    """Raise `UsageError` for a form of the autoencoder that is not supported."""
    for part in ("encoder", "decoder"):
        taken = inspect.signature(type(getattr(autoencoder, part)).forward).parameters
        if "feat_cache" not in taken:
            raise UsageError(
                f"the {part} of this {type(autoencoder).__name__} takes no feat_cache, so its"
                " frames cannot run in chunks",
                hint="its class is of an untested version of diffusers",
            )


def networks(autoencoder: Any, part: str) -> dict[str, nn.Module]:
    """Return the submodules, by name, that ``part`` ("encoder" or "decoder") calls."""
    convolution = {"encoder": "quant_conv", "decoder": "post_quant_conv"}[part]
    return {name: getattr(autoencoder, name) for name in (part, convolution)}


def clear_caches(autoencoder: Any) -> None:
    """Free what a call of its own that was interrupted has left in the module."""
    autoencoder.clear_cache()


def encoder(autoencoder: Any) -> ClipPart:
    """Return the part that maps frames in -1..1 to the parameters of the posterior."""
    return _part(_ChunkEncoder(autoencoder).eval(), _ENCODER_FRAMES, drops_rest=True)


def decoder(autoencoder: Any) -> ClipPart:
    """Return the part that maps latents (B, C, T, H, W) to frames in -1..1."""
    return _part(_ChunkDecoder(autoencoder).eval(), _DECODER_FRAMES)


def _part(
    network: _ChunkEncoder | _ChunkDecoder, frames: tuple[int, int], **more: bool
) -> ClipPart:
    shapes = _cache_shapes(network, frames)
    return ClipPart(_FirstChunk(network, shapes), _LaterChunk(network, shapes), frames, **more)


class _ChunkEncoder(nn.Module):
    """Encoder of one chunk, which reads and changes a list of caches."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.encoder, self.quant_conv = autoencoder.encoder, autoencoder.quant_conv
        self._patch = _patch_size(autoencoder)
        self.channels = self.encoder.conv_in.in_channels // self._patch**2

    def forward(self, chunk: Tensor, caches: list[Any], *, first: bool) -> Tensor:
        del first  # the caches tell
        if self._patch > 1:
            from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

            chunk = patchify(chunk, self._patch)
        return self.quant_conv(self.encoder(chunk, feat_cache=caches, feat_idx=[0]))


class _ChunkDecoder(nn.Module):
    """Decoder of one chunk, which reads and changes a list of caches."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.decoder, self.post_quant_conv = autoencoder.decoder, autoencoder.post_quant_conv
        self._patch = _patch_size(autoencoder)
        self.channels = self.post_quant_conv.in_channels
        taken = inspect.signature(type(self.decoder).forward).parameters
        self._told_first = "first_chunk" in taken

    def forward(self, chunk: Tensor, caches: list[Any], *, first: bool) -> Tensor:
        more = {"first_chunk": first} if self._told_first else {}
        latent = self.post_quant_conv(chunk)
        frames = self.decoder(latent, feat_cache=caches, feat_idx=[0], **more)
        if self._patch > 1:
            from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

            frames = unpatchify(frames, self._patch)
        return frames.clamp(-1, 1)


def _patch_size(autoencoder: Any) -> int:
    """Return the side of the squares of pixels that are channels of the network."""
    return getattr(autoencoder.config, "patch_size", None) or 1


class _FirstChunk(nn.Module):
    """The first chunk, which fills up the caches with frames of zeros.

    They are what later convolutions pad with, where they find fewer frames.
    """

    def __init__(self, network: nn.Module, shapes: Sequence[_CacheShape]) -> None:
        super().__init__()
        self.network, self._shapes = network, tuple(shapes)
        self.training = False

    def forward(self, chunk: Tensor) -> tuple[Tensor, ...]:
        """Return the result and the caches after a chunk (1, C, T, H, W)."""
        caches: list[Any] = [None] * len(self._shapes)
        made = self.network(chunk, caches, first=True)
        state = []
        for cache, shape in zip(caches, self._shapes, strict=True):
            if shape is None:
                continue
            channels, kept, scale = shape
            if isinstance(cache, Tensor):
                state.append(F.pad(cache, (0, 0, 0, 0, kept - cache.shape[2], 0)))
            else:
                height, width = (side * scale for side in chunk.shape[3:])
                state.append(chunk.new_zeros(1, channels, kept, height, width))
        return (made, *state)


class _LaterChunk(nn.Module):
    """A later chunk, with the caches as arguments and results."""

    def __init__(self, network: nn.Module, shapes: Sequence[_CacheShape]) -> None:
        super().__init__()
        self.network, self._shapes = network, tuple(shapes)
        self.training = False

    def forward(self, chunk: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the result and the caches after a chunk (1, C, T, H, W)."""
        given = iter(state)
        caches = [None if shape is None else next(given) for shape in self._shapes]
        made = self.network(chunk, caches, first=False)
        return (made, *(one for one in caches if one is not None))


def _cache_shapes(
    network: _ChunkEncoder | _ChunkDecoder, frames: tuple[int, int]
) -> list[_CacheShape]:
    """Return the shapes of the caches after two chunks, by which all of them are there."""
    weight = next(network.parameters())
    # one for each convolution; some are left empty
    caches: list[Any] = [None] * sum(isinstance(one, nn.Conv3d) for one in network.modules())
    kept, fake = PythonStatePlaces(network).kept(), FakeTensorMode(allow_non_fake_inputs=True)
    with kept, torch.no_grad(), fake:
        for count, first in zip(frames, (True, False), strict=True):
            shape = 1, network.channels, count, _TRIAL_SIDE, _TRIAL_SIDE
            chunk = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            network(chunk, caches, first=first)
    return [
        (one.shape[1], one.shape[2], one.shape[3] // _TRIAL_SIDE)
        if isinstance(one, Tensor)
        else None
        for one in caches
    ]
