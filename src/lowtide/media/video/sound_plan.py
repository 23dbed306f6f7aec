"""What becomes of sound: copied where the container holds it, else encoded."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.core.errors import UsageError
from lowtide.media.video.opened_video import load_av
from lowtide.media.video.video_containers import TITLES, holds_stream

# FFmpeg's encoders by the name of their codec, and bits a second of each channel.
_ENCODERS = {"aac": ("aac", 96_000), "opus": ("libopus", 64_000), "flac": ("flac", 0)}
# What `sound` may be besides the name of a file.
SOUND_WORDS = ("auto", "copy", "none", *_ENCODERS)
# Loudspeakers by their number, where a file does not say which or an encoder has no others.
_LAYOUTS = ("mono", "stereo", "3.0", "quad", "5.0", "5.1", "6.1", "7.1")
_WHOLE_16 = ("u8", "u8p", "s16", "s16p")
_AAC_BITS = 4  # a sample and channel, of which its frames hold 6


@dataclass(frozen=True)
class SoundEncoding:
    """How a stream of sound is encoded.

    Attributes:
        encoder: FFmpeg's name of the encoder.
        rate: Samples a second.
        layout: FFmpeg's name of the loudspeakers.
        format: FFmpeg's name of the samples' format.
        bit_rate: Bits a second, or 0 for as many as it takes.
    """

    encoder: str
    rate: int
    layout: str
    format: str
    bit_rate: int

    def add_to(self, output: Any) -> Any:
        """Add a stream to an output that has no header yet, and open its encoder."""
        made = output.add_stream(self.encoder, rate=self.rate, bit_rate=self.bit_rate)
        made.codec_context.layout, made.codec_context.format = self.layout, self.format
        made.codec_context.open()
        return made


@dataclass(frozen=True)
class SoundFate:
    """What becomes of a stream of sound: ``copied``, ``encoded`` or ``dropped``, and why."""

    action: Any
    into: str = ""
    reason: str = ""
    encoding: SoundEncoding | None = None


def sound_fate(stream: Any, codec: str, container: str, sound: str, target: Path) -> SoundFate:
    """What becomes of a stream of an opened file.

    Args:
        stream: The stream.
        codec: FFmpeg's name of its codec.
        container: FFmpeg's name of the output's format.
        sound: One of `SOUND_WORDS`; another text is the name of the file that it comes from.
        target: The output, for messages.

    Raises:
        UsageError: It cannot become what ``sound`` asks for.
    """
    if sound == "none":
        return SoundFate("dropped", reason="--sound none")
    held = holds_stream(container, stream)
    if held and (sound not in _ENCODERS or sound == codec):
        return SoundFate("copied")
    lacks = f"{TITLES[container]} files hold no {codec}"
    if sound == "copy":
        raise UsageError(
            f"{target}: sound {stream.index} cannot be copied: {lacks}",
            hint=_other_container(stream, target) + "--sound auto encodes it",
        )
    if stream.codec_context is None:
        raise UsageError(
            f"{target}: sound {stream.index} ({codec}) cannot be copied into a {target.suffix}"
            " file, and FFmpeg cannot decode it",
            hint=_other_container(stream, target) + "--sound none leaves it out",
        )
    wanted = sound if sound in _ENCODERS else _usual(stream, container)
    encoding, changed = _encoding(stream, container, wanted)
    if encoding is None:
        usual = "--sound auto takes a codec that it holds"
        raise UsageError(
            f"{target}: sound {stream.index} ({codec}) cannot be encoded into {wanted} in a"
            f" {target.suffix} file",
            hint=usual if sound in _ENCODERS else "--sound none leaves it out",
        )
    why = f"--sound {sound}" if sound in _ENCODERS else lacks
    return SoundFate("encoded", wanted, "; ".join((why, *changed)), encoding)


def _other_container(stream: Any, target: Path) -> str:
    if not holds_stream("matroska", stream):
        return ""
    return f"name the output {target.with_suffix('.mkv').name}, or "


def _usual(stream: Any, container: str) -> str:
    if container in ("mp4", "mov"):
        return "aac"
    codec = stream.codec_context.codec
    return "flac" if container == "matroska" and codec.lossless and not codec.lossy else "opus"


def _encoding(stream: Any, container: str, wanted: str) -> tuple[SoundEncoding | None, list[str]]:
    """The encoding into ``wanted`` that changes least, and what it changes; None if there is none.

    Encoders say which loudspeakers they know when they are opened.
    """
    av, sound = load_av(), stream.codec_context
    name, bits = _ENCODERS[wanted]
    codec = av.Codec(name, "w")
    given = sound.sample_rate
    rates = sorted(codec.audio_rates or [given])
    rate = next((one for one in rates if one >= given), rates[-1])
    formats = [one.name for one in codec.audio_formats]
    whole = sound.format is not None and sound.format.name in _WHOLE_16
    format = "s16" if whole and "s16" in formats else formats[-1]
    count = sound.layout.nb_channels
    likely = _LAYOUTS[count - 1] if 0 < count <= len(_LAYOUTS) else "stereo"
    for layout in (sound.layout.name, likely, "stereo"):
        try:
            channels = av.AudioLayout(layout).nb_channels
            bit_rate = channels * min(bits, _AAC_BITS * rate if wanted == "aac" else bits)
            found = SoundEncoding(name, rate, layout, format, bit_rate)
            with av.open(io.BytesIO(), "w", format=container) as output:
                found.add_to(output)
                output.start_encoding()
        except (ValueError, av.error.FFmpegError):
            continue
        changed = [] if rate == given else [f"{rate:,} samples a second instead of {given:,}"]
        if channels != count:
            changed.append(f"{count} channels are mixed into {channels}")
        return found, changed
    return None, []
