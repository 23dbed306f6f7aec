"""Encoder of a video's pictures, one file per segment, and the order of a segment's packets."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lowtide.core.atomic_file import sync_to_disk, write_error
from lowtide.core.cpuinfo import cpuinfo_field
from lowtide.core.errors import OutputError
from lowtide.media.video.encoder_settings import CODECS, VideoEncoderSettings
from lowtide.media.video.opened_video import load_av, open_media_file, packets_with_data
from lowtide.media.video.picture_format import PictureFormat, frame_from_planes, range_number
from lowtide.media.video.side_data import Hdr10Light

if TYPE_CHECKING:
    import av
    import av.container
    import av.video.stream


# x264 and x265 make other bytes with other numbers of threads, so it must not be the machine's.
_THREADS = 4
_X264_BLOCK = 16
_RATE_UNITS = 100_000  # FFmpeg's fractions are of 32 bits
_LOCATIONS = "unspecified left center topleft top bottomleft bottom".split()

_TASKS = Path("/proc/self/task")
# Of a thread: its policy, and its priority within that.
Scheduling = tuple[int, int]


class VideoSegmentEncoder:
    """File of encoded pictures, written frame by frame by an encoder of its own.

    The same frames, stamps and arguments make the same packets on any machine.

    Args:
        path: New file, whose suffix chooses the container: .mp4, .mov or .mkv.
        settings: Codec and effort.
        format: How frames come, one that the codec holds (`held_format`).
        time_base: Unit of the stamps in seconds.
        frame_rate: Mean frames a second of the whole video, by which encoders choose a level and
            spread bits; stamps never depend on it. None if unknown.
        pixel_aspect: Width of a pixel divided by its height, or None if unknown.
        light: HDR10 data of the picture, or None; x264, x265 and svtav1 have a place for it.

    Raises:
        OutputError: The file cannot be written, or the encoder refuses such pictures.
    """

    def __init__(
        self,
        path: Path,
        settings: VideoEncoderSettings,
        format: PictureFormat,
        *,
        time_base: Fraction,
        frame_rate: Fraction | None = None,
        pixel_aspect: Fraction | None = None,
        light: Hdr10Light | None = None,
    ) -> None:
        self._path, self._format, self._time_base = path, format, time_base
        av = load_av()
        try:
            self._container: av.container.OutputContainer = av.open(str(path), "w")
        except OSError as error:
            raise write_error(path, error) from error
        with self._failures():
            stream = self._container.add_stream(
                CODECS[settings.codec].encoder,
                rate=frame_rate and frame_rate.limit_denominator(_RATE_UNITS),
                options=settings.options | _options(settings.codec, format, light),
            )
            self._stream = cast("av.video.stream.VideoStream", stream)
            self._describe(pixel_aspect)
            with keep_scheduling(), _quiet_svt():
                self._container.start_encoding()

    def write(self, planes: Sequence[np.ndarray], pts: int) -> None:
        """Encode a frame, planes in `planes_of`'s order, with a stamp in units of the time base.

        Raises:
            OutputError: The file cannot be written; it is removed.
        """
        frame = frame_from_planes(planes, self._format)
        frame.pts, frame.time_base = pts, self._time_base
        self._encode(frame)

    def close(self) -> None:
        """Encode what the encoder holds back, close the file and sync it; raises `OutputError`."""
        self._encode(None)
        with self._failures():
            self._container.close()
            sync_to_disk(self._path)

    def abort(self) -> None:
        """Remove the file."""
        # What is still buffered may not be writable.
        with contextlib.suppress(OSError, load_av().error.FFmpegError):
            self._container.close()
        self._path.unlink(missing_ok=True)

    def _encode(self, frame: av.VideoFrame | None) -> None:
        with self._failures():
            self._container.mux(self._stream.encode(frame))

    def _describe(self, pixel_aspect: Fraction | None) -> None:
        """Set what the stream says of its pictures."""
        stream, format = self._stream, self._format
        stream.width, stream.height, stream.pix_fmt = format.width, format.height, format.name
        context, tags = stream.codec_context, format.tags
        context.time_base, context.thread_count = self._time_base, _THREADS
        context.color_primaries, context.color_trc = tags.primaries, tags.transfer
        context.colorspace, context.color_range = tags.matrix, range_number(format)
        if pixel_aspect is not None:
            context.sample_aspect_ratio = pixel_aspect

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Remove the file and raise `OutputError` where FFmpeg fails."""
        try:
            yield
        except OSError as error:
            self.abort()
            raise write_error(self._path, error) from error
        except (ValueError, load_av().error.FFmpegError) as error:
            self.abort()
            format = self._format
            raise OutputError(
                f"{self._path}: {format.width}×{format.height} frames of {format.name} cannot be"
                f" written: {error}",
                hint=_hint(error),
            ) from error


@contextlib.contextmanager
def _quiet_svt() -> Iterator[None]:
    """Let SVT-AV1, which would write every setting to stderr, write errors only."""
    given = os.environ.get("SVT_LOG")
    os.environ["SVT_LOG"] = given or "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ["SVT_LOG"]


def _hint(error: Exception) -> str | None:
    """Return what helps where an encoder failed that may lack memory: FFmpeg does not say why."""
    if isinstance(error, load_av().error.ExternalError) and _is_limited():
        return "if memory was lacking: raise the limit of this process (ulimit -d, ulimit -v)"
    return None


def _is_limited() -> bool:
    """Return whether the shell limits the private memory or the addresses of this process."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    kinds = resource.RLIMIT_DATA, resource.RLIMIT_AS
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)


def _x264_instructions(format: PictureFormat) -> dict[str, str]:
    """Return x264's parameter that makes its bytes depend on nothing but the frames.

    With AVX-512 it reads memory that it has not written (build 165, `mbtree`) where the blocks of
    a row are not a multiple of 8. All other instructions make the same bytes.
    """
    if -(-format.width // _X264_BLOCK) % 8 == 0 or machine().lower() not in ("x86_64", "amd64"):
        return {}
    known = " ".join(cpuinfo_field("flags")[:1]).split()
    if known and "avx512f" not in known:
        return {}
    # Where the system does not say what there is, no processor that runs PyTorch lacks SSE4.2.
    return {"asm": "AVX2" if "avx2" in known else "SSE4.2"}


def _options(codec: str, format: PictureFormat, light: Hdr10Light | None) -> dict[str, str]:
    """Return FFmpeg's options that follow from the picture, and those that keep bytes the same."""
    options = {"chroma_sample_location": _LOCATIONS[format.chroma_location]}
    said = light.parameters(codec) if light is not None else {}
    if codec == "x265":
        own = {"log-level": "error", "pools": str(_THREADS), "frame-threads": "2"}
        if said:
            own["hdr10"] = "1"
        said = own | said
    if codec == "x264":
        said = _x264_instructions(format) | said
    if codec == "svtav1":
        said = {"lp": "2"} | said  # its own level of threads, of which 4 takes half more memory
    if said:
        options[f"{codec}-params"] = ":".join(f"{key}={value}" for key, value in said.items())
    return options


def thread_scheduling() -> dict[int, Scheduling]:
    """Return how each thread of this process is scheduled; nothing where there is no /proc."""
    found: dict[int, Scheduling] = {}
    for thread in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            number = int(thread.name)
            priority = os.sched_getparam(number).sched_priority
            found[number] = os.sched_getscheduler(number), priority
    return found


@contextlib.contextmanager
def keep_scheduling() -> Iterator[None]:
    """Give threads the scheduling back that they had before, and new ones that of this thread.

    SVT-AV1 makes its own threads and the one that opens it real-time where it may: those of a
    whole machine then wait for them.
    """
    before = thread_scheduling()
    try:
        yield
    finally:
        for number, now in thread_scheduling().items():
            policy, priority = before.get(number) or before[threading.get_native_id()]
            if now != (policy, priority):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(number, policy, os.sched_param(priority))


@dataclass(frozen=True)
class SegmentPacketOrder:
    """Order in which a run's frames are stored.

    Attributes:
        rank: Place in presentation of each packet, over all segments (N,), int64.
        delay: Packets that are stored before one of them is shown.
    """

    rank: np.ndarray
    delay: int


def segment_suffix(codec: str) -> str:
    """Ending of segments of ``codec``, by FFmpeg's name.

    Matroska would round times to milliseconds, by which the order of close frames is lost.
    """
    return ".mov" if codec == "prores" else ".mp4"


def segment_packet_order(segments: Sequence[Path], due: int) -> SegmentPacketOrder:
    """Order of the packets of segments that follow each other and hold ``due`` frames.

    The stamps of a segment say only which frame comes first: its container may have rounded them.

    Raises:
        OutputError: There are more or fewer frames, two of a segment have one stamp, or segments
            differ in what a decoder has to know beforehand, of which a file holds one.
    """
    ranks: list[np.ndarray] = []
    count = 0
    headers = set()
    for path in segments:
        with open_media_file(path) as opened:
            shown = opened.streams.video[0]
            headers.add(shown.codec_context.extradata)
            found = packets_with_data(opened.demux(shown))
            stamps = [packet.pts for packet in found]
        if None in stamps or len(set(stamps)) != len(stamps):
            raise OutputError(f"{path}: the segment's frames cannot be told by their times")
        ranks.append(count + np.argsort(np.argsort(np.array(stamps, np.int64))))
        count += len(stamps)
    if len(headers) > 1:
        raise OutputError(
            f"{segments[0].parent}: the segments were encoded with different settings"
        )
    if count != due:
        raise OutputError(f"{due} frames were due, and {count} are in the encoded segments")
    rank = np.concatenate(ranks)
    delay = int(np.max(np.arange(count) - rank, initial=0))
    return SegmentPacketOrder(rank, delay)


def decoding_stamps(stamps: np.ndarray, delay: int) -> np.ndarray:
    """Decoding stamps of N packets whose frames are shown at ``stamps`` (N,), rising.

    The stamps themselves, ``delay`` packets late: they rise, and none lies after its frame.
    """
    step = max(1, int(stamps[1] - stamps[0])) if len(stamps) > 1 else 1
    before = stamps[0] - step * np.arange(delay, 0, -1)
    return np.concatenate([before, stamps])[: len(stamps)]


def picture_packets(
    segments: Sequence[Path],
    order: SegmentPacketOrder,
    stamps: np.ndarray,
    durations: np.ndarray,
    time_base: Fraction,
) -> Iterator[Any]:
    """Packets of all segments with their frames' stamps and durations (N,) of ``time_base``."""
    decoding = decoding_stamps(stamps, order.delay)
    place = 0
    for path in segments:
        with open_media_file(path) as opened:
            for packet in packets_with_data(opened.demux(opened.streams.video[0])):
                frame = order.rank[place]
                packet.time_base = time_base
                packet.pts, packet.dts = int(stamps[frame]), int(decoding[place])
                packet.duration = int(durations[frame])
                place += 1
                yield packet
