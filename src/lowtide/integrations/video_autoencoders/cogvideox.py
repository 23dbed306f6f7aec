"""CogVideoX's video autoencoder: its nested caches of convolutions as carried state.

Chunks are those that it cuts by itself, of which the first takes what is left: statistics of its
norms are of all frames of a chunk, so that others would give other results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lowtide.integrations.video_autoencoders.clip_part import ClipPart

CLASSES = ("AutoencoderKLCogVideoX",)

# Convolutions of single frames, inside of norms: they fill their caches but never read them.
_UNREAD = ("conv_y", "conv_b")


def check(autoencoder: Any) -> None:
    """Accept any sizes."""


def networks(autoencoder: Any, part: str) -> dict[str, nn.Module]:
    """Return the submodules, by name, that ``part`` ("encoder" or "decoder") calls."""
    convolution = {"encoder": "quant_conv", "decoder": "post_quant_conv"}[part]
    called = {name: getattr(autoencoder, name) for name in (part, convolution)}
    return {name: one for name, one in called.items() if one is not None}


def clear_caches(autoencoder: Any) -> None:
    """Do nothing: the module keeps no cache."""


def encoder(autoencoder: Any) -> ClipPart:
    """Return the part that maps frames in -1..1 to the parameters of the posterior."""
    count = autoencoder.num_sample_frames_batch_size
    chunk = _CachedChunk(autoencoder.encoder, after=autoencoder.quant_conv)
    return ClipPart(chunk, chunk, (count, count))


def decoder(autoencoder: Any) -> ClipPart:
    """Return the part that maps latents (B, C, T, H, W) to frames in about -1..1."""
    count = autoencoder.num_latent_frames_batch_size
    chunk = _CachedChunk(autoencoder.decoder, before=autoencoder.post_quant_conv)
    return ClipPart(chunk, chunk, (count, count))


class _CachedChunk(nn.Module):
    """Encoder or decoder of one chunk; without a state it is the first one."""

    def __init__(
        self, network: nn.Module, *, before: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.network, self.before, self.after = network, before, after
        self.training = False
        # Where each tensor of the state is in the nested caches, as of the first chunk.
        self._places: list[tuple[str, ...]] = []

    def forward(self, chunk: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the result and the state after a chunk (1, C, T, H, W)."""
        cache = _nested(self._places, state) if state else None
        given = chunk if self.before is None else self.before(chunk)
        made, cache = self.network(given, conv_cache=cache)
        found = dict(_flat(cache))
        if not state:
            self._places = list(found)
        return (made if self.after is None else self.after(made), *found.values())


def _flat(cache: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of nested caches that are read again, each with its place."""
    if isinstance(cache, Tensor):
        yield place, cache
    elif cache is not None:
        for name, one in cache.items():
            if name not in _UNREAD:
                yield from _flat(one, (*place, name))


def _nested(places: list[tuple[str, ...]], state: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return nested caches of these tensors."""
    cache: dict[str, Any] = {}
    for place, one in zip(places, state, strict=True):
        inner = cache
        for name in place[:-1]:
            inner = inner.setdefault(name, {})
        inner[place[-1]] = one
    return cache
