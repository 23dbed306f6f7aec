"""Parts of a video autoencoder that run in segments, and go on where a stopped run was.

When a segment is finished, the state between its last chunk and the next one is kept beside it, in
place of the one before. So a run that goes on makes the same bytes as one that was not stopped, and
repeats no more than the chunks since then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lowtide.core.atomic_file import sync_to_disk, write_error
from lowtide.core.errors import NotFiniteError
from lowtide.integrations.clip_autoencoder import PlannedClipPart
from lowtide.jobs.clips.result import ClipResult
from lowtide.jobs.clips.work import VideoSegment, segments_folder
from lowtide.streaming.clip_plan import RunPart

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.streaming.clip_plan import ReadChunk
    from lowtide.streaming.engine.clip_chunks import CarriedState

# Opens what a part takes, from this frame or latent on.
OpenReading = Callable[[int], AbstractContextManager["ReadChunk"]]
# Called with the segment, the number and the values of each frame or latent, (1, C, H, W).
UseMade = Callable[[VideoSegment, int, "Tensor"], object]


@dataclass(frozen=True)
class PartSegment:
    """Runs of a part whose results are finished together.

    Attributes:
        made: The frames or latents that they make, and their file.
        runs: Number of the first run, and of the one after the last.
        first_taken: Number of the first frame or latent that they take.
    """

    made: VideoSegment
    runs: tuple[int, int]
    first_taken: int

    @property
    def state(self) -> VideoSegment:
        """File of the state that its last run leaves."""
        made = self.made
        return VideoSegment(made.first, made.last, made.path.with_suffix(".state"), made.how)


def part_segments(
    part: PlannedClipPart, target: Path, *, step: int, count: int, suffix: str, offset: int = 0
) -> list[PartSegment]:
    """Return the segments of a part.

    Args:
        part: The part.
        target: The output.
        step: Frames of a segment, at least; the last one may have fewer.
        count: Frames or latents to keep of what it makes.
        suffix: End of the names of the segments' files.
        offset: Number of the first one that it makes.
    """
    found, folder, sizes = list[PartSegment](), segments_folder(target), part.run_sizes
    taken = made = 0
    begin = 0, 0, 0
    for run, (more_taken, more_made) in enumerate(sizes, start=1):
        taken, made = taken + more_taken, made + more_made
        first_run, first_taken, first = begin
        frames = max(taken - first_taken, made - first)  # latents are fewer
        if run < len(sizes) and (frames < step or made >= count):
            continue
        path = folder / f"{offset + first:09}{suffix}"
        last = offset + min(made, count)
        segment = VideoSegment(offset + first, last, path, part.identity)
        found.append(PartSegment(segment, (first_run, run), first_taken))
        begin = run, taken, made
    return found


class SegmentedRun:
    """Run of a part in segments, which are finished by ``use`` when it has the last frame of one.

    Args:
        part: The part.
        segments: All of its segments.
        result: What they are segments of.
    """

    def __init__(
        self,
        part: PlannedClipPart,
        segments: Sequence[PartSegment],
        result: ClipResult,
    ) -> None:
        self.segments = segments
        self._part, self._result, self._work = part, result, result.work

    @cached_property
    def done(self) -> int:
        """Number of segments, from the first one on, behind which the run goes on."""
        done = 0
        for number, one in enumerate(self.segments, start=1):
            if not self._result.is_finished(one.made):
                break
            if number == len(self.segments) or self._work.is_finished(one.state):
                done = number
        return done

    @property
    def due(self) -> int:
        """Number of frames or latents that are not finished."""
        return sum(one.made.last - one.made.first for one in self.segments[self.done :])

    def run(
        self, open_reading: OpenReading, use: UseMade, after_chunk: Callable[[int], None]
    ) -> None:
        """Run all that is not finished.

        Args:
            open_reading: Opens what the part takes.
            use: Called with each frame or latent to keep.
            after_chunk: Called with the number of these that a chunk has made.

        Raises:
            NotFiniteError: A chunk has NaN or infinity.
            OutputError: The state cannot be kept.
        """
        if self.done == len(self.segments):
            return
        due = list(self.segments[self.done :])
        start, number = due[0], due[0].made.first
        ends = {one.runs[1]: one for one in due[:-1]}
        before = self.segments[self.done - 1] if self.done else None
        chunk = self._part.chunks_before(start.runs[0])

        def write(chunk_made: Tensor) -> None:
            nonlocal number, chunk
            chunk, first = chunk + 1, number
            if not chunk_made.isfinite().all():
                raise _not_finite(chunk, self._part)
            for made in chunk_made.unbind(2):
                if not due:
                    break
                use(due[0].made, number, made)
                number += 1
                if number == due[0].made.last:
                    del due[0]
            after_chunk(number - first)

        def keep(runs: int, state: CarriedState) -> None:
            nonlocal before
            if (one := ends.get(runs)) is not None:
                self._keep_state(one.state, state)
                if before is not None:
                    before.state.path.unlink(missing_ok=True)
                before = one

        with contextlib.ExitStack() as opened:
            state: BinaryIO | None = None
            if before is not None:
                state = opened.enter_context(before.state.path.open("rb"))
            read = opened.enter_context(open_reading(start.first_taken))
            self._part.run(read, write, RunPart(start.runs[0], state=state, after_run=keep))
        if before is not None:
            before.state.path.unlink(missing_ok=True)

    def _keep_state(self, place: VideoSegment, state: CarriedState) -> None:
        part = self._work.new_part(place)
        try:
            with part.open("wb") as file:
                state.save(file)
            sync_to_disk(part)
            self._work.finish(place, part)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise write_error(place.path, error) from error


def _not_finite(chunk: int, part: PlannedClipPart) -> NotFiniteError:
    dtype = str(part.like.dtype).removeprefix("torch.")
    return NotFiniteError(
        f"chunk {chunk:,} that the model made has values that are not finite (NaN or infinity), in"
        f" {dtype}",
        hint="the weights or the latents may be damaged",
    )
