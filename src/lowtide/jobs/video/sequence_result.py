"""Output of image files, one per frame, made in segments like a video.

Frames wait in the hidden folder of `VideoWork`, each segment with a file of their hashes, until all
were read back; then each gets its name. A run that is killed meanwhile leaves some with their
names, which the next one knows by their hashes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from lowtide.core.atomic_file import put_in_place, require_output, sync, write_error
from lowtide.core.errors import ImageError, OutputError, UsageError
from lowtide.core.hashing import file_sha256
from lowtide.core.progress import Cancel, check_cancel
from lowtide.jobs.clips.result import MadeFrame, StartReading
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.clips.work import SEQUENCE_SUFFIX, VideoSegment, VideoWork, work_folder
from lowtide.media.video.frame_pattern import FramePattern
from lowtide.media.video.frame_sequence import SequenceFacts, read_frame
from lowtide.media.video.frame_writing import upright, write_frame

_FORCE_HINT = "--force to replace them, or another folder"


class PictureWriter:
    """Writes a picture for each frame; a segment is a list of their hashes.

    Args:
        pattern: Names of the files.
        task: What they are made of.
        work: The folder of segments.
        cancel: Stops reading back.
        start_reading: Begins the progress of reading back.
        replace: Whether files that have the frames' names in the end are replaced.
    """

    def __init__(
        self,
        pattern: FramePattern,
        task: VideoTask,
        work: VideoWork,
        cancel: Cancel,
        start_reading: StartReading,
        *,
        replace: bool,
    ) -> None:
        self._pattern, self._task, self._work = pattern, task, work
        self._cancel, self._start_reading, self._replace = cancel, start_reading, replace
        self._names = [pattern.name(task.number(one)) for one in range(task.first, task.last)]
        self._replaced = {one for one in self._names if os.path.lexists(pattern.folder / one)}
        self._written: dict[str, str] = {}

    def write(self, frame: MadeFrame) -> None:
        """Write the picture of the next frame."""
        facts, name = self._task.facts, self._pattern.name(self._task.number(frame.index))
        path = self._work.folder / name
        icc = facts.icc if isinstance(facts, SequenceFacts) else None
        write_frame(path, upright(frame.planes, facts.rotation, facts.mirrored), icc)
        self._written[name] = file_sha256(path)

    def end_segment(self, segment: VideoSegment) -> Path:
        """Write the hashes of a segment's pictures."""
        part = self._work.new_text(segment, json.dumps(self._written))
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
        advance, task = self._start_reading(), self._task
        due = (task.stored.height, task.stored.width)
        if task.facts.rotation % 180:
            due = due[::-1]
        for name in self._names:
            check_cancel(self._cancel)
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
            path = self._work.folder / name
            if not path.exists():
                continue  # named by a run that was killed
            try:
                replace = self._replace or name in self._replaced  # by a run that was killed
                put_in_place(path, folder / name, replace=replace)
            except OSError as error:
                raise write_error(folder / name, error) from error
        with contextlib.suppress(OSError):  # folders of some file systems cannot be synced
            sync(folder)
        return self._pattern.path

    def abort(self) -> None:
        """Remove the pictures of the segment that is not finished."""
        for name in self._written:
            with contextlib.suppress(OSError):  # the error that led here says more
                (self._work.folder / name).unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        """Return where a complete frame is."""
        path = self._work.folder / name
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
    for path in work_folder(pattern.path).glob(f"[0-9]*{SEQUENCE_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):  # a journal says which are complete
            made |= json.loads(path.read_text("utf-8"))
    others = [path for path in found if made.get(path.name) != file_sha256(path)]
    if others:
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        raise UsageError(f"{others[0]} already exists{more}", hint=_FORCE_HINT)
