"""Encoding and decoding of one clip: what goes in, what is written, and what is left to do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from lowtide.core.heap import trim_heap
from lowtide.core.progress import raise_if_cancelled
from lowtide.core.units import format_bytes
from lowtide.integrations.clip_autoencoder import ClipAutoencoder, PartName, PlannedClipPart
from lowtide.jobs.clips.result import ClipResult, ComputedFrame, ContainerWriter, SegmentWriter
from lowtide.jobs.clips.work import STARTED_OVER, SegmentsFolder, VideoSegment
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.vae.frames import ClipComparison, ClipReader, images_of, planes_of
from lowtide.jobs.vae.inputs import VaeClip
from lowtide.jobs.vae.latents import LatentWriter, facts_of_clip
from lowtide.jobs.vae.report import PartCheck
from lowtide.jobs.vae.segments import SegmentedRun, part_segments
from lowtide.jobs.vae.settings import VaeSettings
from lowtide.jobs.vae.verify import check_part
from lowtide.media.video.video_encoder import segment_suffix

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.streaming.clip_plan import ReadChunk


class PhaseClock:
    """Seconds by phase; those of a phase inside of another are not the other's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = 0.0  # of phases within the one that runs

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        started, outer, self._inside = time.perf_counter(), self._inside, 0.0
        yield
        taken = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._inside
        self._inside = outer + taken


class ClipRun:
    """One run of a job on its clip: what its parts share."""

    def __init__(
        self,
        settings: VaeSettings,
        model: ClipAutoencoder,
        clip: VaeClip,
        item: JobItem,
        parts: Mapping[PartName, PlannedClipPart],
        pipeline: JobPipeline,
        key: str,
    ) -> None:
        self.settings, self.model, self.clip, self.item = settings, model, clip, item
        self.parts, self.pipeline, self.clock = parts, pipeline, PhaseClock()
        self.work = SegmentsFolder(item.target, key)
        # Bytes of the state that is kept, and of the one before, which may be there already.
        self._state_bytes = 2 * max(part.plan.state_bytes for part in parts.values())
        kept = sum(one.stat().st_size for one in self.work.folder.glob("*.state"))
        free = shutil.disk_usage(self.work.folder).free
        self._state_fits = self._state_bytes <= free + kept

    @property
    def step(self) -> int:
        """Frames of a segment: all of them where the disk has no room for the state between."""
        return self.settings.segment if self._state_fits else self.clip.shapes.padded[0]

    def notes(self, first: Encoding | Decoding) -> list[str]:
        """Return what the user should know of the parts that a stopped run left."""
        found = []
        if self.work.has_finished and not first.run_of_part.done:
            found.append(STARTED_OVER)
        if not self._state_fits:
            found.append(
                f"the disk has no room for {format_bytes(self._state_bytes)} of state between"
                " chunks: if this is stopped, it starts over"
            )
        return found

    def counter(self, run: SegmentedRun, unit: str) -> Callable[[int], None]:
        """Return what is called with the number of frames or latents that a chunk has made."""
        budget = self.model.budget
        report = self.pipeline.report_rows(self.item, budget, run.due, unit)

        def count(made: int) -> None:
            trim_heap()  # chunks would leave gaps, which would add up
            raise_if_cancelled(self.pipeline.cancel)
            if report is not None:
                report(made)

        raise_if_cancelled(self.pipeline.cancel)
        return count


class Encoding:
    """Encoding of a video to latents."""

    def __init__(self, run: ClipRun) -> None:
        self._run, self._part = run, run.parts["encoder"]
        settings, clip, work = run.settings, run.clip, run.work
        shape = clip.shapes.latents
        segments = part_segments(
            self._part, run.item.target, step=run.step, count=shape[1], suffix=".latents"
        )
        made = [one.made for one in segments]
        seed = settings.seed if settings.sample else None
        facts = facts_of_clip(
            clip.task,
            model=run.model.kind,
            scaling=run.model.scaling,
            posterior="sample" if settings.sample else "mean",
            seed=seed,
        )
        self._writer = LatentWriter(
            run.item.target, clip.task, work, made, shape, seed, facts, replace=run.item.replace
        )
        self.result = ClipResult(self._writer)
        self.run_of_part = SegmentedRun(self._part, segments, self.result)

    @property
    def resumed(self) -> int:
        """Frames that a stopped run has encoded."""
        due = self.run_of_part.segments[self.run_of_part.done :]
        return due[0].first_taken if due else self._run.clip.task.frames

    def run(self) -> None:
        """Encode what is not finished."""
        clock = self._run.clock

        def use(segment: VideoSegment, number: int, made: Tensor) -> None:
            self.result.write_frame(ComputedFrame(segment, number, [made.numpy()]))

        with clock.phase("encode"):
            count = self._run.counter(self.run_of_part, "latents")
            self.run_of_part.run(self._open_reading, use, count)

    def latents(self) -> Tensor:
        """Return all latents, (1, C, n, h, w)."""
        return self._writer.latents()

    def check(self, free_bytes: int) -> PartCheck | str:
        """Compare the first latents with those of the model's own call."""
        run = self._run
        with self._open_reading(0) as read:
            return check_part(
                run.model,
                "encoder",
                self._part,
                read,
                free_bytes=free_bytes,
                total=run.clip.shapes.latents[1],
                size=None,
            )

    @contextmanager
    def _open_reading(self, first: int) -> Iterator[ReadChunk]:
        height, width = self._part.like.shape[3:]
        cancel = self._run.pipeline.cancel
        with ClipReader(self._run.clip.task, height, width, cancel, first) as reader:

            def read(count: int) -> Tensor:
                with self._run.clock.phase("read"):
                    return reader.read(count)

            yield read


class Decoding:
    """Decoding of latents to frames, which are written, compared, or both."""

    def __init__(self, run: ClipRun) -> None:
        self._run, self._part = run, run.parts["decoder"]
        # Of a round trip, how far the frames are from those that went in.
        self.figures: dict[str, float | None] = {}
        task, work, item, found = run.clip.task, run.work, run.item, run.clip.found
        assert task.encoder is not None
        segments = part_segments(
            self._part,
            item.target,
            step=run.step,
            count=task.frames,
            suffix=segment_suffix(task.encoder.codec),
            offset=task.first,
        )
        made = [one.made for one in segments]
        if found.target is None:
            self.result = ClipResult(SegmentWriter(task, work, made))
        else:
            report, budget = run.pipeline.report_rows, run.model.budget
            reading = partial(report, item, budget, task.frames, "frames", phase="check")
            given = task, work, made, run.pipeline.cancel, reading
            self.result = ClipResult(ContainerWriter(item.target, *given, replace=item.replace))
        self.run_of_part = SegmentedRun(self._part, segments, self.result)

    @property
    def resumed(self) -> int:
        """Frames that a stopped run has decoded."""
        return self._run.clip.task.frames - self.run_of_part.due

    def run(self, latents: Tensor | None) -> None:
        """Decode what is not finished of latents (1, C, n, h, w)."""
        assert latents is not None
        self._latents = lambda: latents
        run, task = self._run, self._run.clip.task
        height, width = task.stored.height, task.stored.width
        with ExitStack() as opened:
            comparison = None
            if run.clip.found.operation == "roundtrip":
                comparison = opened.enter_context(ClipComparison(task, run.pipeline.cancel))
                if self.run_of_part.done:
                    comparison.recall(self.run_of_part.segments[self.run_of_part.done - 1].made)

            def use(segment: VideoSegment, number: int, made: Tensor) -> None:
                (image,) = images_of(made.unsqueeze(2), height, width)
                if comparison is not None:
                    with run.clock.phase("compare"):
                        comparison.add(image)
                        if number == segment.last - 1:
                            comparison.keep(run.work, segment)
                with run.clock.phase("write"):
                    planes = [] if run.clip.found.target is None else planes_of(image, task)
                    self.result.write_frame(ComputedFrame(segment, number, planes))

            with run.clock.phase("decode"):
                count = run.counter(self.run_of_part, "frames")
                self.run_of_part.run(
                    lambda first: nullcontext(_reader_of(latents, first)), use, count
                )
            if comparison is not None:
                self.figures = comparison.figures()

    def check(self, free_bytes: int) -> PartCheck | str:
        """Compare the first frames with those of the model's own call."""
        run, task = self._run, self._run.clip.task
        return check_part(
            run.model,
            "decoder",
            self._part,
            lambda count: self._latents()[:, :, :count],
            free_bytes=free_bytes,
            total=task.frames,
            size=(task.stored.height, task.stored.width),
        )


def _reader_of(latents: Tensor, first: int) -> ReadChunk:
    """Return what reads the next latents, from the ``first`` on."""
    done = first

    def read(count: int) -> Tensor:
        nonlocal done
        done += count
        return latents[:, :, done - count : done]

    return read
