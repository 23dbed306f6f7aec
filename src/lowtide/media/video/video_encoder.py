"""Encoders of a video's pictures, one file per segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.atomic_file import write_error
from lowtide.core.errors import OutputError, UsageError
from lowtide.media.video.hdr10_light import Hdr10Light
from lowtide.media.video.picture_format import PictureFormat, frame_of
from lowtide.media.video.pyav import load_av

if TYPE_CHECKING:
    import av
    import av.video.stream


@dataclass(frozen=True)
class VideoCodec:
    """An encoder of FFmpeg's and the settings that it takes.

    Args:
        encoder: FFmpeg's name.
        quality_option: Its option for constant quality, or None if it has none.
        quality: Default and range of that.
        preset_option: Its option for presets.
        presets: Their names; the default comes first.
    """

    encoder: str
    quality_option: str | None
    quality: tuple[float, float, float] | None
    preset_option: str | None
    presets: tuple[str, ...]


_X_PRESETS = tuple(
    "medium ultrafast superfast veryfast faster fast slow slower veryslow placebo".split()
)
CODECS = {
    "x264": VideoCodec("libx264", "crf", (18, 0, 51), "preset", _X_PRESETS),
    "x265": VideoCodec("libx265", "crf", (20, 0, 51), "preset", _X_PRESETS),
    "svtav1": VideoCodec(
        "libsvtav1", "crf", (28, 1, 63), "preset", ("8", *(str(n) for n in range(14) if n != 8))
    ),
    "prores": VideoCodec("prores_ks", None, None, "profile", ("hq", "proxy", "lt", "standard")),
    "ffv1": VideoCodec("ffv1", None, None, None, ()),
}


@dataclass(frozen=True)
class EncoderSettings:
    """Codec and effort of an output.

    Args:
        codec: One of `CODECS`.
        quality: Constant quality in the codec's own measure, smaller is better; None for its
            default.
        preset: Its preset; None for its default.

    Raises:
        UsageError: There is no such codec, or it has no such quality or preset.
    """

    codec: str = "x264"
    quality: float | None = None
    preset: str | None = None

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise UsageError(
                f"there is no video codec {self.codec!r}", hint=f"--codec {'|'.join(CODECS)}"
            )


class SegmentEncoder:
    """File of encoded pictures, written frame by frame by an encoder of its own.

    Args:
        path: New file; its suffix chooses the container.
        settings: Codec and effort.
        format: How frames come, which the codec must hold.
        time_base: Unit of the stamps in seconds.
        pixel_aspect: Width of a pixel divided by its height, or None if unknown.
        light: HDR10 data of the picture, or None.

    Raises:
        OutputError: The file cannot be written, or the encoder refuses.
    """

    def __init__(
        self,
        path: Path,
        settings: EncoderSettings,
        format: PictureFormat,
        *,
        time_base: Fraction,
        pixel_aspect: Fraction | None = None,
        light: Hdr10Light | None = None,
    ) -> None:
        self._path, self._format, self._time_base = path, format, time_base
        codec = CODECS[settings.codec]
        av = load_av()
        self._container: av.container.OutputContainer = av.open(str(path), "w")
        stream = self._container.add_stream(codec.encoder)
        stream.width, stream.height, stream.pix_fmt = format.width, format.height, format.name
        context, tags = stream.codec_context, format.tags
        context.time_base = time_base
        context.color_primaries, context.color_trc = tags.primaries, tags.transfer
        context.colorspace = tags.matrix
        context.color_range = 0 if tags.full_range is None else 1 + tags.full_range
        if pixel_aspect is not None:
            context.sample_aspect_ratio = pixel_aspect
        options = {}
        if codec.quality_option and codec.quality:
            options[codec.quality_option] = f"{settings.quality or codec.quality[0]:g}"
        if codec.preset_option:
            options[codec.preset_option] = settings.preset or codec.presets[0]
        stream.options = options
        self._stream = stream

    def write(self, planes: Sequence[np.ndarray], pts: int) -> None:
        """Encode a frame with stamp ``pts``, in units of the time base."""
        frame = frame_of(planes, self._format)
        frame.pts, frame.time_base = pts, self._time_base
        self._encode(frame)

    def close(self) -> None:
        """Encode what the encoder holds back, and close the file."""
        self._encode(None)
        try:
            self._container.close()
        except OSError as error:
            self.abort()
            raise write_error(self._path, error) from error

    def abort(self) -> None:
        """Remove the file."""
        self._container.close()
        self._path.unlink(missing_ok=True)

    def _encode(self, frame: av.VideoFrame | None) -> None:
        av = load_av()
        try:
            for packet in self._stream.encode(frame):
                self._container.mux(packet)
        except av.error.ExternalError as error:
            raise OutputError(f"{self._path}: the encoder refuses: {error}") from error
        except OSError as error:
            raise write_error(self._path, error) from error
