"""EasyAnimate's video autoencoder: frames that its modules keep, as carried state.

Each causal convolution keeps its last frames in ``prev_features`` of its own, and each upsampler
there whether it has run before: the first frame is not doubled in time. Here they are arguments and
results, and the modules keep nothing. The first chunk is one frame or one latent. Later ones are of
one latent, whatever the module's batch size is, since norms of single frames make that no
difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.integrations.video_autoencoders.clip_part import ClipPart

CLASSES = ("AutoencoderKLMagvit",)

_KEPT = "prev_features"


def check(autoencoder: Any) -> None:
    """Raise `UsageError` for a form of the autoencoder that is not supported."""
    if not autoencoder.config.spatial_group_norm:
        raise UsageError(
            f"this {type(autoencoder).__name__} has norms over frames (spatial_group_norm=False),"
            " whose statistics depend on how a clip is cut; only norms of single frames can run in"
            " bands yet"
        )


def networks(autoencoder: Any, part: str) -> dict[str, nn.Module]:
    """Return the submodules, by name, that ``part`` ("encoder" or "decoder") calls."""
    convolution = {"encoder": "quant_conv", "decoder": "post_quant_conv"}[part]
    return {name: getattr(autoencoder, name) for name in (part, convolution)}


def clear_caches(autoencoder: Any) -> None:
    """Free what a call of its own that was interrupted has left in the module."""
    autoencoder._clear_conv_cache()


def encoder(autoencoder: Any) -> ClipPart:
    """Return the part that maps frames in -1..1 to the parameters of the posterior."""
    chunk = _KeptFrames(nn.Sequential(autoencoder.encoder, autoencoder.quant_conv))
    strides = (one.stride[0] for one in chunk.modules() if isinstance(one, nn.Conv3d))
    return ClipPart(chunk, chunk, (1, math.prod(strides)), refuses_rest=True)


def decoder(autoencoder: Any) -> ClipPart:
    """Return the part that maps latents (B, C, T, H, W) to frames in about -1..1."""
    chunk = _KeptFrames(nn.Sequential(autoencoder.post_quant_conv, autoencoder.decoder))
    return ClipPart(chunk, chunk, (1, 1))


class _KeptFrames(nn.Module):
    """Encoder or decoder of one chunk; without a state it is the first one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.training = False

    def forward(self, chunk: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the result and the state after a chunk (1, C, T, H, W)."""
        keeping = [one for one in self.network.modules() if hasattr(one, _KEPT)]
        convolutions = [one for one in keeping if isinstance(one, nn.Conv3d)]
        with _emptied(keeping):
            if state:
                for one in keeping:  # an upsampler asks only whether there is anything
                    setattr(one, _KEPT, True)
                for one, kept in zip(convolutions, state, strict=True):
                    setattr(one, _KEPT, _padded(one, kept))
            made = self.network(chunk)
            return (made, *(_cut(one, getattr(one, _KEPT)) for one in convolutions))


@contextmanager
def _emptied(modules: list[nn.Module]) -> Iterator[None]:
    """Let modules keep nothing before and after."""
    try:
        for one in modules:
            setattr(one, _KEPT, None)
        yield
    finally:
        for one in modules:
            setattr(one, _KEPT, None)


def _padded(convolution: nn.Conv3d, kept: Tensor) -> Tensor:
    """Return frames as a convolution keeps them, with the padding that comes before it."""
    return F.pad(kept, (0, 1, 0, 1)) if _halves(convolution) else kept


def _cut(convolution: nn.Conv3d, kept: Tensor) -> Tensor:
    """Return the frames that the next chunk will read, without padding."""
    kept = kept[:, :, convolution.stride[0] - convolution.kernel_size[0] :]
    return kept[:, :, :, :-1, :-1] if _halves(convolution) else kept


def _halves(convolution: nn.Conv3d) -> bool:
    return convolution.stride[1] == 2
