"""Sound: what becomes of it in a container, and encoding it again, each sample at its time."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.media.video.opened_video import load_av
from lowtide.media.video.packet_times import TimeMapping, packet_time
from lowtide.media.video.video_containers import TITLES, holds_stream

# Stamps this far from where the samples before ended are a gap, or sound that comes twice.
_GAP = Fraction(1, 1000)
_TICK = Fraction(1, 1000)  # of Matroska
# A jump of more seconds is an error of the stamps.
_BELIEVED = 3600
# Seconds of sound before a part that are decoded for it.
_BEFORE = 1

# FFmpeg's encoders by the name of their codec, and bits a second of each channel.
_ENCODERS = {"aac": ("aac", 96_000), "opus": ("libopus", 64_000), "flac": ("flac", 0)}
# What `sound` may be besides the name of a file.
SOUND_WORDS = ("auto", "copy", "none", *_ENCODERS)
# Loudspeakers by their number, where a file does not say which or an encoder has no others.
_LAYOUTS = ("mono", "stereo", "3.0", "quad", "5.0", "5.1", "6.1", "7.1")
_WHOLE_16 = ("u8", "u8p", "s16", "s16p")
_AAC_BITS = 4  # a sample and channel, of which its frames hold 6


class SoundEncoder:
    """Encoder of the packets of a stream.

    Sound follows that before it without a gap as long as stamps agree: where they leave time out,
    as lost packets do, there is silence, and what comes twice is left out.

    Args:
        stream: Sound of an opened file.
        output: Container in which the encoded stream is made.
        encoding: How it is encoded.
        window: Part of the source that is kept, to the sample.

    Attributes:
        made: The new stream.
        damaged: Packets that could not be decoded.
    """

    def __init__(
        self, stream: Any, output: Any, encoding: SoundEncoding, window: TimeMapping
    ) -> None:
        self.made = encoding.add_to(output)
        self.damaged = 0
        self._decoder, self._encoding, self._window = stream.codec_context, encoding, window
        self._tolerance = max(_GAP, 2 * (stream.time_base or _GAP))
        # PyAV reads beyond the planes of frames with 8 of them, which packed samples have not.
        self._packed = load_av().AudioFormat(encoding.format).packed.name
        self._resampler: Any = None
        self._kind: tuple[str, str, int] | None = None
        self._begin = 0
        self._due: int | None = None  # sample that comes next
        self._earlier: int | None = None  # samples by which stamps are less
        self._waiting: list[np.ndarray] = []  # (samples, channels)

    def heard(self, packet: Any | None) -> Iterator[Any]:
        """Decoded frames of a packet in the encoder's format; of None, what is left at the end."""
        try:
            frames = self._decoder.decode(packet)
        except load_av().error.FFmpegError:
            self.damaged += 1
            frames = []
        for frame in [*frames, None] if packet is None else frames:
            yield from self._resampled(frame)

    def convert(self, packet: Any) -> Iterator[Any]:
        """Encoded packets that are complete with this one."""
        first, last = self._window.first, self._window.last
        begin = packet_time(packet)
        if (first is None or begin >= first - _BEFORE) and (last is None or begin < last):
            for part in self.heard(packet):
                yield from self._placed(part)

    def flush(self) -> Iterator[Any]:
        """Encoded packets of what was still waiting at the end."""
        for part in self.heard(None):
            yield from self._placed(part)
        yield from self._frames(1)
        yield from self._stamped(self.made.encode(None))

    def _resampled(self, frame: Any | None) -> Iterator[Any]:
        """Frames of the encoder's kind; None gives what a resampler still holds."""
        kind = frame and (frame.format.name, frame.layout.name, frame.sample_rate)
        if kind != self._kind and self._resampler is not None:
            yield from self._resampler.resample(None)
            self._resampler = None
        self._kind = kind
        if frame is None:
            return
        if self._resampler is None:
            chosen = self._encoding
            self._resampler = load_av().AudioResampler(self._packed, chosen.layout, chosen.rate)
        yield from self._resampler.resample(frame)

    def _placed(self, part: Any) -> Iterator[Any]:
        """Put a frame's samples behind those before, at their time, and encode what is complete."""
        values, rate = part.to_ndarray(), self._encoding.rate
        values = values.reshape(-1, part.layout.nb_channels)
        first, last = (
            None if end is None else ceil(end * rate)
            for end in (self._window.first, self._window.last)
        )
        begin, due = self._due or 0, self._due
        if part.pts is not None:
            stated = round(part.pts * part.time_base * rate)
            if due is None or self._tolerance < Fraction(abs(stated - due), rate) < _BELIEVED:
                begin = stated
        if due is None:
            due = self._due = self._begin = begin if first is None else max(begin, first)
        values = values[max(0, due - begin) :]
        begin = max(begin, due)
        if last is not None:
            values = values[: max(0, last - begin)]
        silent = begin - due if len(values) else 0
        for place in range(0, silent, rate):
            yield from self._added(
                np.zeros((min(rate, silent - place), values.shape[1]), values.dtype)
            )
        yield from self._added(values)

    def _added(self, values: np.ndarray) -> Iterator[Any]:
        self._waiting.append(values)
        self._due = (self._due or 0) + len(values)
        yield from self._frames(self.made.codec_context.frame_size or 1024)

    def _frames(self, least: int) -> Iterator[Any]:
        """Encode what is waiting, in the encoder's frames, as long as there are ``least``."""
        size = self.made.codec_context.frame_size or 1024
        waiting = sum(map(len, self._waiting))
        if waiting < least or self._due is None:
            return
        values, begin = np.concatenate(self._waiting), self._due - waiting
        first = 0
        while waiting - first >= least:
            part = values[first : first + size]
            yield from self._stamped(self.made.encode(self._frame(part, begin + first)))
            first += len(part)
        self._waiting = [values[first:]]

    def _frame(self, values: np.ndarray, begin: int) -> Any:
        av, chosen = load_av(), self._encoding
        packed = np.ascontiguousarray(values.reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(packed, self._packed, chosen.layout)
        frame.sample_rate, frame.pts = chosen.rate, begin
        frame.time_base = Fraction(1, chosen.rate)
        return frame

    def _stamped(self, packets: list[Any]) -> list[Any]:
        """Packets of the output, of which the first ones hold what the encoder begins with."""
        if packets and self._earlier is None:
            self._earlier = 0
            if self.made.container.format.name in ("matroska", "webm"):
                # Its muxer rounds this delay and the stamps each by itself, to milliseconds.
                delay = Fraction(self._begin - packets[0].pts, self._encoding.rate)
                rounded = Fraction(floor(delay / _TICK + Fraction(1, 2))) * _TICK
                self._earlier = round((rounded - delay) * self._encoding.rate)
        for packet in packets:
            packet.stream = self.made
            packet.pts -= self._earlier or 0
            packet.dts = packet.pts
        return packets


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
