"""Codecs that videos are written with: what each takes, and the pictures that it can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.core.errors import UsageError
from lowtide.media.video.opened_video import load_av
from lowtide.media.video.picture_format import (
    BT_709,
    ColorTags,
    PictureFormat,
    SampleLayout,
    planar_name,
    sample_layout,
)
from lowtide.media.video.side_data import Hdr10Light

_LEFT, _TOP_LEFT = 1, 3


@dataclass(frozen=True)
class VideoCodec:
    """An encoder of FFmpeg's, its settings and its limits.

    Args:
        encoder: FFmpeg's name of it.
        quality: Default, best and worst constant quality; None where there is no such setting.
        preset: Default preset; None where there are none, or where the format decides.
        presets: All presets.
        preset_option: FFmpeg's name of the option for presets.
        sides: Least and largest width and height.
        least_width: Width below which the encoder writes out of bounds.
        whole_chroma: Whether sizes must be multiples of the chroma step.
        full_range: Whether full-range pictures can be tagged.
        locations: Chroma locations that can be tagged.
    """

    encoder: str
    quality: tuple[float, float, float] | None = None
    preset: str | None = None
    presets: tuple[str, ...] = ()
    preset_option: str = "preset"
    sides: tuple[int, int] = (1, 32_768)
    least_width: int = 1
    whole_chroma: bool = False
    full_range: bool = True
    locations: tuple[int, ...] = tuple(range(7))

    def formats(self, preset: str | None) -> list[str]:
        """Return FFmpeg's names of the pixel formats that a preset can hold."""
        names = [format.name for format in load_av().Codec(self.encoder, "w").video_formats]
        if self.encoder == "prores_ks" and preset is not None:
            return [name for name in names if ("444" in name) == ("444" in preset)]
        return names


_X_PRESETS = tuple(
    "ultrafast superfast veryfast faster fast medium slow slower veryslow placebo".split()
)
CODECS = {
    "x264": VideoCodec(
        "libx264", (18, 0, 51), "medium", _X_PRESETS, sides=(1, 16_384), whole_chroma=True
    ),
    "x265": VideoCodec(
        "libx265",
        (20, 0, 51),
        "medium",
        _X_PRESETS,
        sides=(16, 16_384),
        least_width=56,
        whole_chroma=True,
    ),
    "svtav1": VideoCodec(
        "libsvtav1",
        (28, 1, 63),
        "8",
        tuple(str(number) for number in range(14)),
        sides=(4, 8_704),
        locations=(0, _LEFT, _TOP_LEFT),
    ),
    "prores": VideoCodec(
        "prores_ks",
        presets=("proxy", "lt", "standard", "hq", "4444", "4444xq"),
        preset_option="profile",
        full_range=False,
    ),
    "ffv1": VideoCodec("ffv1"),
}


@dataclass(frozen=True)
class VideoEncoderSettings:
    """Codec and effort of an output.

    Args:
        codec: One of `CODECS`.
        quality: Constant quality in the codec's own numbers, of which smaller ones are better;
            None for its default. ProRes and FFV1 have none.
        preset: The codec's own preset, for ProRes its profile; None for its default.
        plays: Whether RGB becomes what players show, 4:2:0 of 10 bits at most.

    Raises:
        UsageError: There is no such codec, or it has no such quality or preset.
    """

    codec: str = "x264"
    quality: float | None = None
    preset: str | None = None
    plays: bool = False

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise UsageError(
                f"there is no video codec {self.codec!r}", hint=f"--codec {'|'.join(CODECS)}"
            )
        name, codec = self.codec, CODECS[self.codec]
        if self.preset is not None and self.preset not in codec.presets:
            raise UsageError(
                f"{name} has no preset {self.preset!r}",
                hint=f"--preset {'|'.join(codec.presets)}" if codec.presets else "leave it out",
            )
        if self.quality is None:
            return
        if codec.quality is None:
            raise UsageError(f"{name} has no quality setting", hint="leave --quality out")
        usual, best, worst = codec.quality
        if not best <= self.quality <= worst:
            raise UsageError(
                f"quality {self.quality:g} of {name} is not in {best:g} (best) to {worst:g}",
                hint=f"--quality {usual:g}",
            )

    @property
    def options(self) -> dict[str, str]:
        """FFmpeg's options of the quality and the preset."""
        codec, options = CODECS[self.codec], {}
        if codec.quality is not None:
            quality = codec.quality[0] if self.quality is None else self.quality
            options["crf"] = f"{quality:g}"
        if preset := self.preset or codec.preset:
            options[codec.preset_option] = preset
        return options


def side_step(settings: VideoEncoderSettings, format: PictureFormat) -> tuple[int, int]:
    """Return what widths and heights of such pictures have to be multiples of."""
    if not CODECS[settings.codec].whole_chroma:
        return 1, 1
    return replace(format, name=_held_name(settings, format), tags=ColorTags()).chroma_step


def held_format(
    settings: VideoEncoderSettings, format: PictureFormat, light: Hdr10Light | None = None
) -> tuple[PictureFormat, list[str]]:
    """Return the format in which a codec holds such pictures, and sentences on what differs.

    It is the same format where the codec has it, else the nearest: first as much color, then as
    many bits, then as much chroma, then no more of these than needed.

    Raises:
        UsageError: The codec cannot hold pictures of this size.
    """
    codec, name, tags = CODECS[settings.codec], _plain(format), format.tags
    nearest, notes = _held_name(settings, format), list[str]()
    if format.kind == "rgb" and settings.plays:
        notes.append(f"RGB becomes {nearest}, which players show: --codec x264 keeps 4:4:4")
    elif nearest != name:
        notes.append(f"{settings.codec} has no {name}: {nearest} is written")
    if format.kind == "rgb" and nearest.startswith("yuv"):
        tags = replace(tags, matrix=BT_709, full_range=False)
        notes.append("RGB is converted to luma and chroma by BT.709")
    elif format.kind == "gray" or format.name.startswith("yuvj"):
        # Some decoders show gray as luma and chroma, where no word means limited.
        tags = replace(tags, full_range=format.full_range_used)
    held = replace(format, name=nearest, tags=tags)
    if held.full_range_used and not codec.full_range:
        held = replace(held, tags=replace(tags, full_range=False))
        notes.append(f"{settings.codec} has no full range: limited range is written")
    if held.chroma_location not in codec.locations and held.chroma_step != (1, 1):
        held = replace(held, chroma_location=_LEFT)
        notes.append(f"{settings.codec} has no such chroma location: left is written")
    if light is not None and not light.parameters(settings.codec):
        notes.append(f"{settings.codec} has no place for the light levels of HDR10: left out")
    _check_size(settings.codec, held)
    return held, notes


def _plain(format: PictureFormat) -> str:
    """Return a format's name as encoders have it: the range is in the tags, the order usual."""
    name = format.name
    if format.kind == "yuv" and format.layout.packed:
        return planar_name(format)
    return name.replace("yuvj", "yuv").removesuffix("be") + ("le" if name.endswith("be") else "")


def _held_name(settings: VideoEncoderSettings, format: PictureFormat) -> str:
    """Return the pixel format in which a codec holds such pictures."""
    name, wanted = _plain(format), format.layout
    if settings.plays and format.kind == "rgb":
        name, wanted = "", SampleLayout("yuv", min(wanted.bits, 10), (2, 2))
    return _nearest(CODECS[settings.codec].formats(settings.preset), name, wanted)


def _nearest(names: list[str], name: str, wanted: SampleLayout) -> str:
    """Return the one of ``names`` that loses least, and then has least too much."""
    layouts = {one: layout for one in names if (layout := sample_layout(one)) is not None}

    def loss(one: str) -> tuple[object, ...]:
        held = layouts[one]
        steps = zip(held.chroma_step, wanted.chroma_step, strict=True)
        return (
            one != name,
            held.kind == "gray" and wanted.kind != "gray",
            max(0, wanted.bits - held.bits),
            wanted.kind != "gray" and sum(max(0, step - other) for step, other in steps),
            held.kind != wanted.kind,
            held.bits,
            -sum(held.chroma_step),
        )

    return min((one for one in layouts if not one.startswith("yuvj")), key=loss)


def _check_size(name: str, format: PictureFormat) -> None:
    """Raise `UsageError` where a codec cannot hold pictures of that size."""
    codec, size = CODECS[name], (format.width, format.height)
    least, largest = codec.sides
    if not (least <= min(size) and max(size) <= largest):
        raise UsageError(
            f"{name} holds pictures of {least:,} to {largest:,} samples a side, not"
            f" {format.width:,}×{format.height:,}",
            hint="--codec ffv1",
        )
    if format.width < codec.least_width:
        raise UsageError(
            f"{name} holds pictures of {codec.least_width} or more samples across, not"
            f" {format.width:,}×{format.height:,}",
            hint="--codec x264, or ffv1",
        )
    if codec.whole_chroma and any(
        side % step for side, step in zip(size, format.chroma_step, strict=True)
    ):
        raise UsageError(
            f"{name} holds no odd sizes of {format.name}: {format.width}×{format.height}",
            hint="--codec ffv1, or svtav1 for 4:2:0",
        )
