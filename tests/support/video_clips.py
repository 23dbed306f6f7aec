"""Video clips that tests write: moving gradients, with sound, subtitles and what else there is."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.subtitles.subtitle import SubtitleSet
from PIL import Image

MILLISECONDS = Fraction(1, 1000)
ASS_HEADER = (
    b"[Script Info]\nScriptType: v4.00+\nPlayResX: 64\nPlayResY: 48\n\n[V4+ Styles]\n"
    b"Format: Name, Fontname, Fontsize, PrimaryColour, SecondaryColour, OutlineColour, BackColour,"
    b" Bold, Italic, Underline, StrikeOut, ScaleX, ScaleY, Spacing, Angle, BorderStyle, Outline,"
    b" Shadow, Alignment, MarginL, MarginR, MarginV, Encoding\n"
    b"Style: Default,Arial,16,&Hffffff,&Hffffff,&H0,&H0,0,0,0,0,100,100,0,0,1,1,0,2,5,5,5,1\n\n"
    b"[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text\n"
)


@dataclass(frozen=True)
class Sound:
    """A tone of the clip; times in seconds."""

    start: float = 0.0
    seconds: float = 1.0
    codec: str = "aac"
    language: str = "und"
    title: str = ""
    disposition: int = 1


@dataclass(frozen=True)
class Text:
    """Subtitles: lines of (start, duration, text), times in milliseconds."""

    codec: str = "srt"
    lines: Sequence[tuple[int, int, str]] = ((100, 300, "One"), (500, 200, "{\\i1}Two{\\i0} bits"))
    language: str = "eng"
    title: str = ""
    disposition: int = 0


@dataclass(frozen=True)
class Clip:
    """What a clip holds; `write` writes it.

    ``stamps`` of ``time_base`` are those of the frames, 25 a second by default. ``tags`` are
    attributes of the encoder: color_primaries, color_trc, colorspace, color_range.
    """

    frames: int = 20
    width: int = 64
    height: int = 48
    codec: str = "libx264"
    pix_fmt: str = "yuv420p"
    options: dict[str, str] = field(default_factory=dict)
    stamps: Sequence[int] | None = None
    time_base: Fraction = Fraction(1, 12800)
    tags: dict[str, int] = field(default_factory=dict)
    rotation: int = 0
    mirrored: bool = False
    pixel_aspect: Fraction | None = None
    picture_tags: dict[str, str] = field(default_factory=dict)
    sounds: Sequence[Sound] = ()
    texts: Sequence[Text] = ()
    chapters: Sequence[tuple[int, int, str]] = ()
    attachments: Sequence[tuple[str, str, bytes]] = ()
    cover: bytes = b""
    data: bool = False
    films: int = 1
    metadata: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path, **options: str) -> Path:
        """Write the clip; ``options`` are FFmpeg's of the container."""
        with av.open(str(path), "w", container_options=options) as output:
            parts = [self._picture(output) for _ in range(self.films if self.frames else 0)]
            parts += [*(_tone(output, sound) for sound in self.sounds)]
            parts += [_lines(output, text) for text in self.texts]
            if self.cover:
                parts.append(_still(output, self.cover))
            if self.data:
                parts.append(_telemetry(output))
            for name, mimetype, payload in self.attachments:
                output.add_attachment(name, mimetype, payload)
            output.metadata.update(self.metadata)
            if self.chapters:
                output.set_chapters([_chapter(*entry) for entry in self.chapters])
            output.start_encoding()
            packets = [packet for part in parts for packet in part()]
            for packet in sorted(packets, key=lambda p: float((p.dts or 0) * p.time_base)):
                output.mux(packet)
        return path

    def due(self) -> list[int]:
        """Stamps of the frames."""
        step = Fraction(1, 25) / self.time_base
        return list(self.stamps or (round(place * step) for place in range(self.frames)))

    def _picture(self, output: Any) -> Callable[[], list[Any]]:
        stream = output.add_stream(self.codec, options=self.options)
        context = stream.codec_context
        context.width, context.height, context.pix_fmt = self.width, self.height, self.pix_fmt
        context.time_base = self.time_base
        context.thread_count = 1
        for name, value in self.tags.items():
            setattr(context, name, value)
        if self.pixel_aspect:
            context.sample_aspect_ratio = self.pixel_aspect
        if self.rotation or self.mirrored:
            stream.set_display_rotation(self.rotation, hflip=self.mirrored)
        stream.metadata.update(self.picture_tags)

        def packets() -> list[Any]:
            made = []
            for place, stamp in enumerate(self.due()):
                frame = gradient(self.width, self.height, self.pix_fmt, place)
                frame.pts, frame.time_base = stamp, self.time_base
                made += stream.encode(frame)
            return made + stream.encode(None)

        return packets


def gradient(width: int, height: int, pix_fmt: str, place: int) -> Any:
    """A frame whose planes are gradients that move with ``place``."""
    frame = av.VideoFrame(width, height, pix_fmt)
    for number, (plane, part) in enumerate(zip(frame.planes, frame.format.components, strict=True)):
        dtype = np.dtype(np.uint8 if part.bits <= 8 else np.uint16)
        rows, columns = np.mgrid[0 : plane.height, 0 : plane.width]
        # Legal in limited range, so that nothing on the way clips it.
        share = (columns * (3 + number) + rows * 2 + place * 5) % 200 / 200
        values = (16 + 200 * share) * 2 ** (part.bits - 8)
        stored = np.zeros((plane.height, plane.line_size // dtype.itemsize), dtype)
        stored[:, : plane.width] = np.rint(values)
        plane.update(stored.tobytes())
    return frame


def picture_bytes(kind: str = "JPEG") -> bytes:
    """A small picture file."""
    made = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), (200, 120, 40), np.uint8)).save(made, kind)
    return made.getvalue()


def full_mkv(path: Path, frames: int = 20) -> Path:
    """A 10-bit HEVC clip of uneven frames with German sound, subtitles, a font and chapters."""
    gaps = np.array([40, 30, 70, 20, 50])
    stamps = [0, *np.cumsum(np.resize(gaps, frames - 1)).tolist()]
    return Clip(
        frames=frames,
        codec="libx265",
        pix_fmt="yuv420p10le",
        options={"x265-params": "log-level=none:pools=none:frame-threads=1:bframes=2"},
        stamps=stamps,
        time_base=MILLISECONDS,
        tags={"color_primaries": 1, "color_trc": 1, "colorspace": 1, "color_range": 1},
        picture_tags={"title": "Bild"},
        sounds=(Sound(language="ger", title="Deutsch", codec="libopus"),),
        texts=(Text(), Text("ass", language="ger", title="Schilder", disposition=64)),
        chapters=((0, 400, "Anfang"), (400, 900, "Ende")),
        attachments=(("clip.ttf", "font/ttf", bytes(range(200))),),
        metadata={"title": "Ein Film"},
    ).write(path)


def rotated_mp4(path: Path, frames: int = 20) -> Path:
    """A phone's clip: turned by 90 degrees, with sound that begins before the picture."""
    return Clip(frames=frames, rotation=90, sounds=(Sound(),)).write(path)


def untagged_mp4(path: Path, frames: int = 20) -> Path:
    """25 frames a second without color tags and sound."""
    return Clip(frames=frames).write(path)


def _tone(output: Any, sound: Sound) -> Callable[[], list[Any]]:
    rate = 48000
    stream = output.add_stream(sound.codec, rate=rate)
    stream.codec_context.layout = "mono"
    stream.metadata.update(_named(sound.language, sound.title))
    stream.disposition = sound.disposition

    def packets() -> list[Any]:
        size = stream.codec_context.frame_size or 1024
        made = []
        for start in range(0, int(sound.seconds * rate), size):
            times = (start + np.arange(size)) / rate
            wave = (0.2 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)[None]
            kind = stream.codec_context.format.name
            whole = np.int32 if kind.startswith("s32") else np.int16
            values = np.rint(wave * np.iinfo(whole).max).astype(whole)
            values = wave if kind.startswith("flt") else values
            frame = av.AudioFrame.from_ndarray(values, kind, "mono")
            frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
            frame.pts = start + round(sound.start * rate)
            made += stream.encode(frame)
        return made + stream.encode(None)

    return packets


def _lines(output: Any, text: Text) -> Callable[[], list[Any]]:
    stream = output.add_stream(text.codec)
    context = stream.codec_context
    context.subtitle_header = ASS_HEADER
    stream.time_base = MILLISECONDS
    stream.metadata.update(_named(text.language, text.title))
    stream.disposition = text.disposition

    def packets() -> list[Any]:
        made = []
        for place, (start, duration, line) in enumerate(text.lines):
            event = f"{place},0,Default,,0,0,0,,{line}".encode()
            packet = context.encode_subtitle(SubtitleSet.create(event, 0, duration))
            made.append(_stamped(packet, stream, start, duration))
        return made

    return packets


def _still(output: Any, picture: bytes) -> Callable[[], list[Any]]:
    codec = "png" if picture.startswith(b"\x89PNG") else "mjpeg"
    stream = output.add_mux_stream(codec, width=16, height=16, time_base=MILLISECONDS)
    stream.disposition = 1024
    return lambda: [_stamped(av.Packet(picture), stream, 0, 0)]


def _telemetry(output: Any) -> Callable[[], list[Any]]:
    stream = output.add_data_stream("bin_data")
    stream.time_base = MILLISECONDS
    return lambda: [_stamped(av.Packet(b"position"), stream, at, 100) for at in (0, 100, 200)]


def _stamped(packet: Any, stream: Any, start: int, duration: int) -> Any:
    packet.stream, packet.time_base = stream, MILLISECONDS
    packet.pts = packet.dts = start
    packet.duration = duration
    packet.is_keyframe = True
    return packet


def _named(language: str, title: str) -> dict[str, str]:
    return {"language": language} | ({"title": title} if title else {})


def _chapter(start: int, end: int, title: str) -> dict[str, Any]:
    metadata = {"title": title}
    return {"id": start, "start": start, "end": end, "time_base": MILLISECONDS} | {
        "metadata": metadata
    }
