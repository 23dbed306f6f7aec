"""What stands in the way of video autoencoders of diffusers that do not run in bands."""

from __future__ import annotations

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


def refusal_of(kind: type) -> str | None:
    """Return why a class cannot run in bands of a clip, or None if nothing is known of it."""
    if kind.__module__.partition(".")[0] != "diffusers":
        return None
    return _REASONS.get(kind.__name__)
