"""Video files opened by FFmpeg, by PyAV, which is optional: picture stream, covers and packets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from lowtide.core.errors import InputError, UsageError, VideoError, install_extra
from lowtide.core.input_file import require_input

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream
    from av.video.codeccontext import VideoCodecContext
    from av.video.stream import VideoStream

_COVER_FLAG = 1024  # FFmpeg's disposition of a still picture that belongs to the file
# Formats that are opened, by FFmpeg's names: those whose data are in the file itself. The others
# are playlists and scripts, which name other files, and texts that FFmpeg draws.
_VIDEO_FORMATS = (
    "mov matroska avi mpegts mpeg mpegvideo asf flv ogg mxf dv gif apng nut ivf rm wtv"
    " h264 hevc vvc m4v obu av1 vc1 mjpeg yuv4mpegpipe image2 webp"
)
_SOUND_FORMATS = (
    "wav w64 aiff au caf"  # codespell:ignore caf
    " mp3 aac flac ac3 eac3 dts truehd mlp amr ape wv tta loas"
)
_STILL = "image2"
# FFmpeg's name of the tag, and the decoders of both colors and transparency.
ALPHA_MODE = "alpha_mode"
_TRANSPARENT_BY = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_ANIMATION = 2  # flag of an extended WebP file
_STILL_BRANDS = ("avif", "heic", "heix", "mif1", "miaf")  # of pictures in the manner of MP4
_REFUSED_FORMAT = 22  # EINVAL, FFmpeg's answer to a format that is not in the list


def load_av() -> ModuleType:
    """Import PyAV; raises `UsageError` where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise UsageError(
            "video files need PyAV, which is not installed", hint=install_extra("video")
        ) from error
    return av


def ffmpeg_name(path: Path) -> str:
    """Name by which FFmpeg opens a file: it takes ``12:30.mp4`` for an address."""
    return str(path.absolute())


def open_media_file(source: Path) -> InputContainer:
    """Opened file of video or sound; raises `InputError` for what FFmpeg cannot read."""
    av = load_av()
    require_input(source)
    try:
        return _opened(source)
    except (OSError, ValueError, av.error.FFmpegError) as error:
        raise InputError(f"{source}: cannot be read as video ({_reason(error)})") from error


def _opened(path: Path) -> InputContainer:
    av = load_av()
    stills = [name for name in av.formats_available if name.endswith("_pipe")]  # of pictures
    read = [*_VIDEO_FORMATS.split(), *_SOUND_FORMATS.split(), *stills]
    options = {"format_whitelist": ",".join(read), "protocol_whitelist": "file"}
    return av.open(ffmpeg_name(path), metadata_errors="replace", options=options)


def _reason(error: Exception) -> object:
    if getattr(error, "errno", None) == _REFUSED_FORMAT:
        return "a playlist, a script or another kind of file without pictures or sound of its own"
    return getattr(error, "strerror", None) or error


@contextmanager
def open_video(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its stream of pictures, which is the first that is no cover art.

    Raises:
        VideoError: It cannot be read, or has none.
    """
    av = load_av()
    require_input(path, VideoError)
    try:
        container = _opened(path)
    except (OSError, ValueError, av.error.FFmpegError) as error:
        index = "the end of an .mp4 or .mov file holds its index, without which nothing is found"
        refused = getattr(error, "errno", None) == _REFUSED_FORMAT
        raise VideoError(
            f"{path}: not a video{'' if refused else ', or cut short'}: {_reason(error)}",
            hint="name the video itself" if refused else index,
        ) from error
    with container:
        found = [one for one in container.streams.video if not is_cover(one)]
        if not found:
            kinds = ", ".join(sorted({one.type for one in container.streams})) or "nothing"
            raise VideoError(f"{path}: no stream of pictures, only {kinds}")
        _require_film(path, container)
        if cast("Any", found[0]).codec_context is None:
            raise VideoError(f"{path}: its pictures are of a codec that is not known here")
        # Or a picture that begins in the midst of a block of memory would keep columns to its left.
        found[0].codec_context.flags |= av.codec.context.Flags.unaligned
        yield container, found[0]


def _require_film(path: Path, container: InputContainer) -> None:
    """Raise `VideoError` for files of pictures, and for animated ones."""
    format, brand = container.format.name, container.metadata.get("major_brand")
    if format == "apng":
        raise VideoError(
            f"{path}: an animated PNG (APNG), which is not read as video",
            hint=f"convert it first: ffmpeg -i {path} -pix_fmt bgr0 -c:v ffv1 OUT.mkv",
        )
    pictures = format.startswith(_STILL) or format.endswith("_pipe")
    if not pictures and brand not in _STILL_BRANDS:
        return
    with path.open("rb") as file:
        head = file.read(21)
    if head[8:16] == b"WEBPVP8X" and head[-1] & _ANIMATION:
        raise VideoError(
            f"{path}: an animated WebP, which is not read as video",
            hint="make images of it first, by libwebp's anim_dump, then"
            " lowtide video 'FOLDER/dump_%04d.png' --fps RATE",
        )
    raise VideoError(f"{path}: a picture", hint=f"lowtide upscale {path} -o OUTPUT")


def decoder_of(stream: VideoStream) -> VideoCodecContext:
    """Return the decoder of a stream.

    Of WebM with transparency, FFmpeg's own decoders take the colors alone: libvpx decodes all.

    Raises:
        VideoError: It has transparency that cannot be read here.
    """
    if not has_separate_alpha(stream):
        return stream.codec_context
    av, name = load_av(), stream.codec_context.name
    try:
        decoder = av.CodecContext.create(_TRANSPARENT_BY[name], "r")
    except av.codec.codec.UnknownCodecError as error:
        raise VideoError(
            f"{stream.container.name}: frames are stored as {name}, with transparency, which cannot"
            " be kept"
        ) from error
    decoder.extradata = stream.codec_context.extradata
    return decoder


def has_separate_alpha(stream: VideoStream) -> bool:
    """Whether a WebM or Matroska file keeps the transparency of a stream beside its frames."""
    marked = any(key.lower() == ALPHA_MODE and text != "0" for key, text in stream.metadata.items())
    return marked and stream.codec_context.name in _TRANSPARENT_BY


def damaged_error(path: Path, damage: str) -> VideoError:
    """Return the error of a damaged file."""
    return VideoError(f"{path}: damaged: {damage}", hint="--damaged keep takes what is there")


def find_picture(opened: InputContainer, source: Path) -> int:
    """Index of the first picture stream that is no cover.

    Raises:
        InputError: There is none.
    """
    for stream in opened.streams.video:
        if not is_cover(stream):
            return stream.index
    raise InputError(f"{source}: the file has no picture stream")


def is_cover(stream: Stream) -> bool:
    """Whether a picture stream is a cover: one still picture."""
    return stream.type == "video" and bool(int(stream.disposition) & _COVER_FLAG)


def packets_with_data(packets: Iterator[Any]) -> Iterator[Any]:
    """Packets of a demuxer without the empty ones that only flush a decoder.

    Those without a decoding stamp are real: Matroska leaves it out where frames are reordered.
    """
    return (packet for packet in packets if packet.size)


def readable_packets(packets: Iterator[Any]) -> Iterator[Any]:
    """Packets of a video up to where its file cannot be read on, which `read_packets` has found."""
    with suppress(load_av().error.FFmpegError):
        yield from packets
