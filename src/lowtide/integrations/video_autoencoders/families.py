"""Registry of the families of video autoencoders by class, and why others do not run in bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from lowtide.integrations.video_autoencoders import cogvideox, magvit, seedvr2, wan
from lowtide.integrations.video_autoencoders.clip_part import ClipPart

_ALL_FRAMES = "its attention is among all frames so far, so that no chunk can be made without them"
_NO_CACHE = (
    "its convolutions keep no frames between calls: it takes a clip as a whole, or in overlapping"
    " temporal tiles that it blends"
)
_OWN_CACHE = "no module is made yet for the frames that its layers keep"
_REASONS = {
    "AutoencoderKLAllegro": "it decodes only in overlapping tiles that it blends",
    "AutoencoderKLCosmos": _ALL_FRAMES,
    "AutoencoderKLHunyuanImageRefiner": _ALL_FRAMES,
    "AutoencoderKLHunyuanVideo": _ALL_FRAMES,
    "AutoencoderKLHunyuanVideo15": _ALL_FRAMES,
    "AutoencoderKLKVAEVideo": _OWN_CACHE,
    "AutoencoderKLLTX2Video": _NO_CACHE,
    "AutoencoderKLLTXVideo": _NO_CACHE,
    "AutoencoderKLMiniMaxH3": "its decoder is a transformer over patches of a clip",
    "AutoencoderKLMochi": _OWN_CACHE,
    "AutoencoderKLQwenImage21": (
        "it is of single images: its convolutions are those of Wan without frames before"
    ),
    "AutoencoderVidTok": _OWN_CACHE,
    "Kandinsky6SRVAE": _OWN_CACHE,
}


class VideoAutoencoderFamily(Protocol):
    """A module about autoencoders of one kind; all functions take one of its classes."""

    # Names of the classes.
    CLASSES: Sequence[str]

    def check(self, autoencoder: Any) -> None:
        """Raise `UsageError` for a form of the autoencoder that is not supported."""
        ...

    def networks(self, autoencoder: Any, part: str) -> dict[str, Any]:
        """Return the submodules, by name, that ``part`` ("encoder" or "decoder") calls."""
        ...

    def clear_caches(self, autoencoder: Any) -> None:
        """Free what a call of its own that was interrupted has left in the module."""
        ...

    def encoder(self, autoencoder: Any) -> ClipPart:
        """Return the part that maps frames to the parameters of the posterior."""
        ...

    def decoder(self, autoencoder: Any) -> ClipPart:
        """Return the part that maps latents to frames."""
        ...


# By the package of their classes.
_FAMILIES = {"diffusers": (wan, magvit, cogvideox), "lowtide": (seedvr2,)}


def family_of(kind: type) -> VideoAutoencoderFamily | None:
    """Return the family of a class, or None if it is no video autoencoder known here."""
    package = kind.__module__.partition(".")[0]
    known = (cast(VideoAutoencoderFamily, one) for one in _FAMILIES.get(package, ()))
    return next((one for one in known if kind.__name__ in one.CLASSES), None)


def class_names() -> list[str]:
    """Return the names of all classes known here."""
    return [
        name
        for family in (*_FAMILIES["diffusers"], *_FAMILIES["lowtide"])
        for name in family.CLASSES
    ]


def refusal_of(kind: type) -> str | None:
    """Return why a class cannot run in bands of a clip, or None if nothing is known of it."""
    if kind.__module__.partition(".")[0] != "diffusers":
        return None
    return _REASONS.get(kind.__name__)
