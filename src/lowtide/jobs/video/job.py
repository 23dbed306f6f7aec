"""Upscaling of videos as a job of the pipeline: frame by frame, in segments that resume."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from lowtide.core.errors import BudgetError
from lowtide.core.input_file import exists, is_folder
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.core.signal import RowSink
from lowtide.core.units import format_bytes
from lowtide.jobs.clips.result import ClipResult, ComputedFrame, ContainerWriter, StartReading
from lowtide.jobs.clips.rows import FrameRowSink, FrameRowSource
from lowtide.jobs.clips.task import VideoTask, frame_facts, video_input_facts, video_task
from lowtide.jobs.clips.work import SegmentsFolder, VideoSegment, pinned_plan, segments_folder
from lowtide.jobs.engine.item import ComputedItem, JobItem
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.engine.report import versions_used
from lowtide.jobs.images.denoise_first import DenoiseFirstJob
from lowtide.jobs.images.job import ItemRun
from lowtide.jobs.images.model_choice import suited_upscaler
from lowtide.jobs.images.planning import PlannedImage
from lowtide.jobs.images.target_size import TargetSize
from lowtide.jobs.video.frames import FirstFramesImage, ReadAhead, WriteBehind, due_frames
from lowtide.jobs.video.report import StreamReport, VideoReport, VideosReport
from lowtide.jobs.video.sequence import (
    VIDEOS,
    PictureWriter,
    find_sequence,
    refuse_existing_frames,
)
from lowtide.jobs.video.settings import VideoSettings
from lowtide.media import ImageFacts
from lowtide.media.discover import DiscoveredFiles, FilePair, MediaKind
from lowtide.media.image_info import ImageRowReader, ImageRowWriter
from lowtide.media.video.frame_pattern import FramePattern
from lowtide.media.video.opened_video import load_av
from lowtide.memory.choice import shortfall
from lowtide.memory.plan import Plan
from lowtide.streaming.tiles.runner import TileRunOutcome


@dataclass
class _Clip:
    """One file that is run, and what its run has found."""

    task: VideoTask
    segments: list[VideoSegment]
    cancel: Cancel = None
    start_reading: StartReading = lambda: None
    content: str = ""
    planes: list[np.ndarray] | None = None
    resumed: int = 0
    repeated: int = 0
    seconds: float = 0.0


class VideoJob(DenoiseFirstJob):
    """Upscales videos with one model, denoised or as they are.

    A plan is for one frame, which is an image for the network. No more than a few frames are in
    memory, and their rows come and go as the plan says.
    """

    settings_type, report_type = VideoSettings, VideosReport
    media_kind: ClassVar[MediaKind] = VIDEOS
    packages = ("av",)
    overlaps = False

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._clips: dict[int, _Clip] = {}  # by index

    @classmethod
    def load_libraries(cls, settings: Any) -> None:
        """Import PyAV too."""
        load_av()
        super().load_libraries(settings)

    @classmethod
    def find(
        cls, inputs: Sequence[str | Path], output: str | Path, settings: VideoSettings
    ) -> DiscoveredFiles:
        """Pair inputs with outputs: video files, or one sequence of images."""
        found = find_sequence(inputs, output, settings.format, settings.suffix)
        return found or super().find(inputs, output, settings)

    @classmethod
    def suited(
        cls, settings: VideoSettings, pairs: Sequence[FilePair], before: Iterable[str] = ()
    ) -> tuple[VideoSettings, str]:
        """Return the settings with a bundled model for these clips, and why, if none is named.

        Of a sequence of images, that for these pictures.
        """
        if settings.model is not None:
            return settings, ""
        files = [pair.source for pair in pairs]
        pattern = None if exists(files[0]) else FramePattern.parse(files[0])
        if pattern is not None:
            files = [pattern.file(one.number) for one in pattern.files()]
        scale, clips = settings.bundled_scale, pattern is None
        name, reason = suited_upscaler(files, scale, before, clips=clips)
        return replace(settings, model=name), reason

    @classmethod
    def refuse_overwriting(cls, pair: FilePair, settings: VideoSettings, *, force: bool) -> None:
        """Raise `UsageError` where the only output, or a file of it, exists."""
        pattern = FramePattern.parse(pair.target)
        if pattern is None:
            super().refuse_overwriting(pair, settings, force=force)
        else:
            task = video_task(pair.source, pair.target, settings, 1)
            numbers = map(task.number, range(task.first, task.last))
            refuse_existing_frames(pattern, numbers, force=force)

    @classmethod
    def inspect(cls, source: Path, settings: VideoSettings) -> ImageFacts:
        """Return the facts of a frame of an input; raises `VideoError` if it cannot be used."""
        return frame_facts(video_input_facts(source, settings))

    @classmethod
    def target_size(
        cls, source: Path, target: Path, settings: Any, scale: int, facts: ImageFacts | None = None
    ) -> TargetSize:
        """Return the sizes of a frame and of its result; raises as `video_task`."""
        return video_task(source, target, settings, scale).sizes(scale)

    def plan(self, item: JobItem) -> PlannedImage:
        """Plan one frame; as before where a stopped run left segments, and that plan fits."""
        try:
            planned = super().plan(item)
        except BudgetError as error:
            task = self._clip(item).task
            most, _ = task.writing_bytes  # host memory, which a GPU's budget is not
            smallest = error.smallest if self.budget.device == "cpu" else None
            if task.encoder and smallest is not None and 2 * most > smallest:
                error.hint = (
                    f"{error.hint}; up to {format_bytes(most)} of it are the encoder's: --codec"
                    " ffv1, or --preset superfast of x264 and x265, take less"
                )
            raise
        if item.limit_bytes is None and is_folder(segments_folder(item.target)):
            pinned = pinned_plan(item.target, self._key(item, planned.plan))
            if pinned is not None and shortfall(pinned, self.budget) is None:
                budget = planned.plan.budget_bytes, planned.plan.host_budget_bytes
                names = "budget_bytes", "host_budget_bytes"
                planned.plan = pinned.model_copy(update=dict(zip(names, budget, strict=True)))
        return planned

    def run(
        self, item: JobItem, planned: PlannedImage, pipeline: JobPipeline, queue_bytes: int
    ) -> ComputedItem:
        """Compute and encode all frames of a video, and join them with its other streams."""
        clip = self._clip(item)
        clip.cancel = pipeline.cancel
        clip.start_reading = partial(
            pipeline.report_rows, item, self.budget, clip.task.frames, "frames", phase="check"
        )
        return super().run(item, planned, pipeline, 0)  # `video_memory` counts what waits

    def open_source(self, item: JobItem, scratch: Path | None) -> ImageRowReader:
        """Return the first frame, by which the error of a plan is measured."""
        clip = self._clip(item)
        task = clip.task
        if clip.planes is None:
            due = due_frames(task, clip.segments[:1], self.settings.keeps_damaged)
            clip.planes = next(due).planes
            due.close()
        assert clip.planes is not None
        return FrameRowSource(clip.planes, task.facts.format)

    def open_noisy(self, item: JobItem, scratch: Path | None) -> ImageRowReader:
        """Return some of the first frames, by which the noise level of a clip is estimated."""
        clip = self._clip(item)
        due = due_frames(clip.task, clip.segments[:1], self.settings.keeps_damaged)
        return FirstFramesImage(due, clip.segments[0], clip.task.facts.format)

    def open_sink(
        self, item: JobItem, planned: PlannedImage, source: ImageRowReader
    ) -> ImageRowWriter:
        """Open an item's result, and lock the folder of its segments."""
        clip, target = self._clip(item), item.target
        work = SegmentsFolder(target, self._key(item, planned.plan))
        pattern = None if clip.task.encoder else FramePattern.parse(target)
        given = clip.task, work, clip.segments, clip.cancel, clip.start_reading
        if pattern is None:
            return ClipResult(ContainerWriter(target, *given, replace=item.replace))
        return ClipResult(PictureWriter(pattern, *given, replace=item.replace))

    def item_report(self, item: JobItem, planned: PlannedImage, status: Any) -> VideoReport:
        """Return the report of a planned or finished file."""
        clip = self._clip(item)
        task = clip.task
        made = task.frames - clip.resumed
        return VideoReport(
            **dict(super().item_report(item, planned, status)),
            seconds_in=task.seconds,
            frames_in=task.frames,
            frames_out=task.frames if status == "done" else 0,
            frames_resumed=clip.resumed,
            frames_repeated=clip.repeated,
            fps=made / clip.seconds if made and clip.seconds else None,
            plan_seconds=planned.plan.seconds * made,
            encoder=task.encoder_text,
            pixel_format=task.stored.name,
            streams=[
                StreamReport(
                    index=one.index,
                    kind=one.kind,
                    codec=one.codec,
                    action=one.action,
                    into=one.into,
                    reason=one.reason,
                    text=str(one),
                )
                for one in task.streams.all_streams
            ],
        )

    def _clip(self, item: JobItem) -> _Clip:
        if item.index not in self._clips:
            scale = self.prepared.geometry.scale
            task = video_task(item.source, item.target, self.settings, scale)
            segments = task.segments(item.target, self.settings.segment)
            self._clips[item.index] = _Clip(task, segments)
        return self._clips[item.index]

    def _key(self, item: JobItem, plan: Plan) -> str:
        """Return all that determines the bytes of segments, except which frames they hold."""
        clip = self._clip(item)
        clip.content = clip.content or clip.task.content_sha256
        model = self.prepared.descriptor.sha256
        settings = self.settings.content_hash(model, self.prepared.precision)
        now = versions_used(self.settings.model_name, self.packages)
        where = self.prepared.network.device
        how = "" if plan.accuracy == "exact" else plan.strategy.model_dump_json()
        return f"{clip.content} {settings} {sorted(now.items())} {where} {how}"

    def _execute(self, run: ItemRun, source: ImageRowReader, sink: RowSink) -> TileRunOutcome:
        """Run the network on the frames of all segments that are not finished."""
        clip, outcome = self._clip(run.item), TileRunOutcome()
        self.set_level(run.item, source.info)
        result = cast(ClipResult, sink)
        due = result.due_segments()
        frames = sum(one.last - one.first for one in due)
        clip.resumed, clip.repeated = clip.task.frames - frames, 0
        result.work.pin(run.planned.plan)
        on_frames = run.pipeline.report_rows(run.item, self.budget, frames, "frames")
        reader = ReadAhead(due_frames(clip.task, due, self.settings.keeps_damaged))
        writer = WriteBehind(result.write_frame)
        started = time.perf_counter()
        try:
            before, planes = None, list[np.ndarray]()
            for frame in reader:
                raise_if_cancelled(run.pipeline.cancel)
                if frame.planes is not before:
                    planes = self._run_frame(run, frame.planes, outcome)
                before = frame.planes
                clip.repeated += not frame.is_decoded
                writer.put(ComputedFrame(frame.segment, frame.index, planes))
                if on_frames is not None:
                    on_frames(1)
            writer.finish()
        finally:
            reader.stop()
            writer.stop()
        clip.seconds = time.perf_counter() - started
        run.planned.notes[:] = dict.fromkeys(run.planned.notes)  # frames repeat what they note
        return outcome

    def _run_frame(
        self, run: ItemRun, planes: list[np.ndarray], outcome: TileRunOutcome
    ) -> list[np.ndarray]:
        """Return the planes that the network makes of a frame."""
        task = self._clip(run.item).task
        source = FrameRowSource(planes, task.facts.format)
        sink = FrameRowSink(run.planned.upscaled, task.stored)
        adapter = self.adapter(run.item, source.info)
        done = self._run_network(run, source, sink, adapter, None)
        outcome.events += done.events
        outcome.fp32_reruns += done.fp32_reruns
        return sink.planes
