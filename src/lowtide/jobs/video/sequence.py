"""Numbered images that are one video: how they are found, and how they are written.

What is written waits in the hidden folder of `SegmentsFolder`, each segment with a file of the
images' hashes, until all were read back; then each gets its name. A run that is killed meanwhile
leaves some with their names, which the next one knows by their hashes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lowtide.core.atomic_file import (
    put_in_place,
    require_name,
    require_output,
    sync_to_disk,
    write_error,
)
from lowtide.core.errors import ImageError, OutputError, UsageError, VideoError
from lowtide.core.input_file import exists, file_sha256, is_folder, require_input
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.jobs.clips.result import ComputedFrame, SegmentWriter, StartReading
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.clips.work import SEQUENCE_SUFFIX, SegmentsFolder, VideoSegment, segments_folder
from lowtide.media.discover import DiscoveredFiles, FilePair, MediaKind
from lowtide.media.video.frame_pattern import FRAME_SUFFIXES, FramePattern
from lowtide.media.video.frame_sequence import (
    FrameSequenceFacts,
    read_frame,
    upright_planes,
    write_frame,
)
from lowtide.media.video.video_containers import CONTAINERS

VIDEOS = MediaKind(
    "video",
    ".mp4 .m4v .mov .mkv .webm .avi .ts .mts .m2ts .mpg .mpeg .vob .dv .wmv .flv .3gp .ogv".split(),
    lambda suffix: CONTAINERS.get("." + suffix.lower().lstrip(".")),
    VideoError,
)
_NEW_NAMES = "%06d"  # of a video's frames
_FORCE_HINT = "--force to replace them, or another folder"


def find_sequence(
    inputs: Sequence[str | Path], output: str | Path, format: str | None, text: str
) -> DiscoveredFiles | None:
    """Pair a sequence of images with its output, or a video with a sequence.

    A sequence is a folder of numbered images without videos, or a pattern such as
    ``frames/%05d.png``, which is also its path in the pair.

    Args:
        inputs: What was asked for; of a sequence no more than that one.
        output: A pattern; a folder, for images of the input's names, or with ``format`` png, tif or
            tiff; or a video file.
        format: Suffix of outputs in a folder.
        text: What results that are named after inputs have in their name.

    Returns:
        The pair; None if neither side is a sequence.

    Raises:
        UsageError: The output is none that fits, or is the input.
        VideoError: A folder holds several sequences.
    """
    require_name(output)
    suffix = None if format is None else "." + format.lower().lstrip(".")
    sources = [_sequence(Path(one)) for one in inputs]
    written = Path(output).suffix.lower() in FRAME_SUFFIXES
    if not any(sources) and suffix not in FRAME_SUFFIXES and not written:
        return None
    if len(inputs) != 1 or (sources[0] is None and is_folder(Path(inputs[0]))):
        raise UsageError(
            "a sequence of images is the only input, or made of one video",
            hint="run them one after another",
        )
    if text:
        raise UsageError(f"--suffix {text} is not for sequences of images", hint="drop it")
    (source,), (given,) = sources, inputs
    if source is None:
        require_input(Path(given), VideoError)
    target = _target(source, output, suffix)
    path = Path(given) if source is None else source.path
    _refuse_input(source, target)
    return DiscoveredFiles([FilePair(path, target, path.as_posix())], [], single_file=True)


def _sequence(path: Path) -> FramePattern | None:
    """Return the pattern of a sequence; None for anything else."""
    if not is_folder(path):
        return None if exists(path) else FramePattern.parse(path)
    found = FramePattern.in_folder(path)
    if found is None or any(VIDEOS.is_named(one) for one in path.rglob("*")):
        return None
    return found


def _target(source: FramePattern | None, output: str | Path, suffix: str | None) -> Path:
    target = Path(output)
    if is_folder(target) or os.fspath(output).endswith(("/", os.sep)) or not target.suffix:
        ending = suffix or (None if source is None else source.path.suffix)
        if ending in CONTAINERS:
            assert source is not None  # only of images is this called for a video
            return target / f"{source.folder.resolve().name}{ending}"
        if suffix is not None and suffix not in FRAME_SUFFIXES:
            VIDEOS.check_name(suffix, f"format {suffix[1:]!r}")
        if source is None:
            return target / f"{_NEW_NAMES}{ending}"
        return target / source.path.with_suffix(ending or "").name
    if suffix is not None and suffix != target.suffix.lower():
        raise UsageError(
            f"--format {suffix[1:]} contradicts the name {target}", hint="drop one of them"
        )
    if FramePattern.parse(target) is None:
        if target.suffix.lower() in FRAME_SUFFIXES:
            raise UsageError(
                f"{target} names one image, and there is one for each frame",
                hint=f"-o '{target.with_name(f'{target.stem}_%05d{target.suffix}')}'",
            )
        VIDEOS.check_name(target.suffix, f"{target}: the suffix {target.suffix!r}")
    return target


def _refuse_input(source: FramePattern | None, target: Path) -> None:
    """Raise `UsageError` where the files of the output would be those of the input."""
    made = FramePattern.parse(target)
    if source is None or made is None or source.folder.resolve() != made.folder.resolve():
        return
    if source.path.name.casefold() == made.path.name.casefold():
        raise UsageError(
            f"{target}: this output is the input", hint="choose another output name or folder"
        )


class PictureWriter(SegmentWriter):
    """Writes a picture for each frame; a segment is a list of their hashes.

    Args:
        pattern: Names of the files.
        task: What they are made of.
        work: The folder of segments.
        segments: All of them.
        cancel: Stops reading back.
        start_reading: Begins the progress of reading back.
        replace: Whether files that have the frames' names in the end are replaced.
    """

    def __init__(
        self,
        pattern: FramePattern,
        task: VideoTask,
        work: SegmentsFolder,
        segments: list[VideoSegment],
        cancel: Cancel,
        start_reading: StartReading,
        *,
        replace: bool,
    ) -> None:
        super().__init__(task, work, segments)
        self._pattern = pattern
        self._cancel, self._start_reading, self._replace = cancel, start_reading, replace
        self._names = [pattern.name(task.number(one)) for one in range(task.first, task.last)]
        self._replaced = {one for one in self._names if os.path.lexists(pattern.folder / one)}
        self._written: dict[str, str] = {}

    def write(self, frame: ComputedFrame) -> None:
        """Write the picture of the next frame."""
        facts, name = self.task.facts, self._pattern.name(self.task.number(frame.index))
        path = self.work.folder / name
        icc = facts.icc if isinstance(facts, FrameSequenceFacts) else None
        write_frame(path, upright_planes(frame.planes, facts.rotation, facts.mirrored), icc)
        self._written[name] = file_sha256(path)

    def end_segment(self, segment: VideoSegment) -> Path:
        """Write the hashes of a segment's pictures."""
        part = self.work.new_text(segment, json.dumps(self._written))
        self._written = {}
        return part

    def is_whole(self, segment: VideoSegment) -> bool:
        """Return whether all pictures of a segment are complete, with or without their names."""
        hashes: dict[str, str] = json.loads(segment.path.read_text("utf-8"))
        return all(
            path.is_file() and file_sha256(path) == hash
            for path, hash in ((self._place(name), hash) for name, hash in hashes.items())
        )

    def join(self) -> list[str]:
        """Read all pictures back."""
        advance, task = self._start_reading(), self.task
        due = (task.stored.height, task.stored.width)
        if task.facts.rotation % 180:
            due = due[::-1]
        for name in self._names:
            raise_if_cancelled(self._cancel)
            path = self._place(name)
            try:
                size = read_frame(path).shape[:2]
            except ImageError as error:
                raise OutputError(f"what was written cannot be read: {error.message}") from error
            if size != due:
                raise OutputError(f"{path}: {due[1]}×{due[0]} was due, not {size[1]}×{size[0]}")
            if advance is not None:
                advance(1)
        return []

    def put_in_place(self) -> Path:
        """Give each picture its name, and return the pattern of them.

        Raises:
            OutputError: Another program has made a file of that name meanwhile, or the folder
                cannot be written.
        """
        folder = self._pattern.folder
        for name in self._names:
            path = self.work.folder / name
            if not path.exists():
                continue  # named by a run that was killed
            try:
                replace = self._replace or name in self._replaced  # by a run that was killed
                put_in_place(path, folder / name, replace=replace)
            except OSError as error:
                raise write_error(folder / name, error) from error
        with contextlib.suppress(OSError):  # folders of some file systems cannot be synced
            sync_to_disk(folder)
        return self._pattern.path

    def abort(self) -> None:
        """Remove the pictures of the segment that is not finished."""
        for name in self._written:
            with contextlib.suppress(OSError):  # the error that led here says more
                (self.work.folder / name).unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        """Return where a complete frame is."""
        path = self.work.folder / name
        return path if path.exists() else self._pattern.folder / name


def refuse_existing_frames(pattern: FramePattern, numbers: Iterator[int], *, force: bool) -> None:
    """Raise `UsageError` where files of frames exist that no stopped run has made.

    Each raises as `require_output` besides; with ``force`` that is all.
    """
    found = []
    for path in map(pattern.file, numbers):
        require_output(path, force=True, makes_folder=True)
        found += [path] if os.path.lexists(path) else []
    if force or not found:
        return
    made: dict[str, str] = {}
    for path in segments_folder(pattern.path).glob(f"[0-9]*{SEQUENCE_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):  # a journal says which are complete
            made |= json.loads(path.read_text("utf-8"))
    others = [path for path in found if made.get(path.name) != file_sha256(path)]
    if others:
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        raise UsageError(f"{others[0]} already exists{more}", hint=_FORCE_HINT)
