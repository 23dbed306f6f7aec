"""One run of a video autoencoder: its model, its parts, its memory, and the time of its phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lowtide.core.errors import BudgetError
from lowtide.core.heap import trim_heap, trimming_heap
from lowtide.core.progress import Cancel, Progress, ProgressCallback, check_cancel, report_phase
from lowtide.integrations.clip_autoencoder import ClipAutoencoder, PartName, PlannedPart
from lowtide.integrations.clip_autoencoder_files import load_clip_autoencoder, preload_libraries
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.engine.devices import resolve_device
from lowtide.jobs.engine.phase_clock import PhaseClock
from lowtide.jobs.vae.clip_reader import ClipReader
from lowtide.jobs.vae.clip_writer import ClipWriter, images_of
from lowtide.jobs.vae.finite_run import OpenReading, run_finite
from lowtide.jobs.vae.memory import device_bytes, memory_report
from lowtide.jobs.vae.report import VaeReport
from lowtide.jobs.vae.settings import VaePrecision, VaeSettings
from lowtide.memory.budget import Budget
from lowtide.memory.ledger import LedgerRow, Place
from lowtide.memory.measurement.cpu_half_precision import slowdown_note
from lowtide.memory.memory_limits import failing_beyond_container
from lowtide.memory.meter import Usage, open_meter
from lowtide.memory.oom import naming_lack_of_memory
from lowtide.models.video_vae.video_vae import latents_of
from lowtide.streaming.tiles.tile_step import DTYPES

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from lowtide.streaming.clip_plan import ReadChunk, WriteChunk

AfterSome = Callable[[int], None]
_PHASES = "read", "encode", "decode", "compare", "write"


@dataclass(frozen=True)
class PartNeeds:
    """A part to plan.

    Attributes:
        part: Which one.
        shape: Number, height and width of the frames or latents that it takes.
        rows: What else takes memory while it runs.
    """

    part: PartName
    shape: tuple[int, int, int]
    rows: Sequence[LedgerRow]


@dataclass
class VaeRun:
    """One call of a job.

    Attributes:
        settings: What was asked for.
        autoencoder: The model in its precision.
        progress: Called after each chunk.
        cancel: Stops the run.
        parts: Parts that are planned.
        rows: By part, what else takes memory while it runs.
        clock: Seconds by phase: read, encode, decode, write, compare.
        notes: What the user should know.
        events: What went another way than planned.
    """

    settings: VaeSettings
    autoencoder: ClipAutoencoder
    progress: ProgressCallback | None
    cancel: Cancel
    parts: dict[PartName, PlannedPart] = field(default_factory=dict)
    rows: dict[PartName, Sequence[LedgerRow]] = field(default_factory=dict)
    clock: PhaseClock = field(default_factory=PhaseClock)
    notes: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._meter = open_meter(self.autoencoder.budget.device)
        self._usage: Usage | None = None

    @classmethod
    def load(cls, settings: VaeSettings, progress: ProgressCallback | None, cancel: Cancel) -> Self:
        """Load the model of ``settings``."""
        device = resolve_device(settings.device)
        assert settings.model is not None
        preload_libraries(settings.model)
        budget = Budget.parse(settings.budget, device=device, scratch=settings.scratch)
        report_phase(progress, "load", str(settings.model))
        precision = settings.resolved_precision
        note = slowdown_note(precision) if device == "cpu" else None
        if note:
            report_phase(progress, "slow", note)
        run = cls(settings, _load(settings, budget, precision), progress, cancel)
        run.notes += [note] if note else []
        return run

    @property
    def place(self) -> Place:
        """Where what is not on a GPU is: on the CPU that is the device."""
        return "device" if self.autoencoder.budget.device == "cpu" else "host"

    def plan(self, *needs: PartNeeds) -> None:
        """Plan parts, for what else takes memory then.

        Raises:
            BudgetError: One does not fit; names the least that would do for all.
        """
        refusals = list[BudgetError]()
        for one in needs:
            report_phase(self.progress, "capture", f"{one.part} of {self.autoencoder.kind}")
            self.rows[one.part] = one.rows
            reserved = device_bytes(one.rows, upper=True)
            try:
                with (
                    failing_beyond_container(),
                    naming_lack_of_memory(f"the {one.part} was planned"),
                ):
                    planned = self.autoencoder.plan(one.part, one.shape, reserved=reserved)
            except BudgetError as refusal:
                refusals.append(refusal)
            else:
                self.parts[one.part] = planned
        if refusals:
            raise max(refusals, key=lambda one: one.smallest or 0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the peak memory of what runs inside."""
        self._meter.start()
        try:
            with trimming_heap():
                yield
            self._usage = self._meter.lap()
        finally:
            self._meter.stop()

    def encode(self, task: VideoTask, latents: Sequence[int]) -> Tensor:
        """Return the latents of a video, (1, *latents*)."""
        import torch

        part = self.parts["encoder"]
        height, width = part.like.shape[3:]
        moments = torch.empty(1, 2 * latents[0], *latents[1:])
        done = 0
        advance = self._advance(f"encoding {task.facts.path.name}", latents[1], "latents")

        @contextmanager
        def open_reading() -> Iterator[ReadChunk]:
            with ClipReader(task, height, width, self.cancel) as reader:
                yield self.clock.timed("read", reader.read)

        def keep(made: Tensor) -> None:
            nonlocal done
            moments[:, :, done : done + made.shape[2]] = made
            done += made.shape[2]
            advance(made.shape[2])

        with self.clock.phase("encode"):
            self._run_part("encoder", open_reading, keep)
        return latents_of(moments, sample=self.settings.sample, seed=self.settings.seed)

    def decode(self, latents: Tensor, task: VideoTask, use: Callable[[np.ndarray], object]) -> None:
        """Call ``use`` with each frame of a task's video, made from latents: (H, W, 3) in 0..1."""
        left = task.frames
        advance = self._advance(f"decoding {task.facts.path.name}", left, "frames")

        def write(made: Tensor) -> None:
            nonlocal left
            for image in images_of(made[:, :, :left], task.stored.height, task.stored.width):
                use(image)
            count = min(left, made.shape[2])
            left -= count
            advance(count)

        with self.clock.phase("decode"):
            self._run_part("decoder", lambda: nullcontext(_reader_of(latents)), write)

    @contextmanager
    def writer(
        self, task: VideoTask, target: Path, *, replace: bool
    ) -> Iterator[Callable[[np.ndarray], None]]:
        """Yield what writes the next frame of a video, which is complete at the end."""
        clip = ClipWriter(task, target, self.cancel, replace=replace)
        try:
            yield self.clock.timed("write", clip.write)
            with self.clock.phase("write"):
                self.notes += clip.commit()
        except BaseException:
            clip.abort()
            raise

    def report(self, **values: Any) -> VaeReport:
        """Return the report; ``values`` are what is not known of the run."""
        done, settings = self.autoencoder, self.settings
        posterior = {}
        if values["operation"] != "decode":
            sampled = settings.sample
            posterior = {
                "posterior": "sample" if sampled else "mean",
                "seed": settings.seed if sampled else None,
            }
        memory = None
        if self._usage is not None:
            parts, rows = list(self.parts.values()), list(self.rows.values())
            memory = memory_report(done.budget.device_bytes, parts, rows, self._usage)
        return VaeReport(
            status="planned" if memory is None else "done",
            model=done.kind,
            budget_bytes=done.budget.device_bytes,
            device=done.budget.device,
            precision=settings.resolved_precision,
            scaling=done.scaling,
            plans={name: part.plan.title for name, part in self.parts.items()},
            memory=memory,
            seconds={
                name: round(self.clock.seconds[name], 3)
                for name in _PHASES
                if name in self.clock.seconds
            },
            notes=self.notes,
            events=self.events,
            **posterior,
            **values,
        )

    def _advance(self, title: str, total: int, unit: str) -> AfterSome:
        """Return what is called with the number of frames or latents that are done more."""
        started, done, meter = time.perf_counter(), 0, self._meter

        def advance(count: int) -> None:
            nonlocal done
            done += count
            trim_heap()  # chunks would leave gaps, which would add up
            check_cancel(self.cancel)
            if self.progress is None:
                return
            event = Progress(
                phase="run",
                name=title,
                done=done,
                total=total,
                elapsed=time.perf_counter() - started,
                memory_bytes=meter.current_bytes,
                peak_bytes=meter.peak_bytes,
                budget_bytes=self.autoencoder.budget.device_bytes,
                unit=unit,
            )
            self.progress(event)

        check_cancel(self.cancel)
        return advance

    def _run_part(self, name: PartName, open_reading: OpenReading, write: WriteChunk) -> None:
        precision = self.settings.resolved_precision

        def wider() -> PlannedPart:
            with self._meter.excluding():
                part, wide = self._wider(name)
            self.events.append(
                f"values of the {name} exceed the range of fp16: run again in {wide}"
            )
            return part

        run_finite(
            self.parts[name],
            open_reading,
            write,
            wider=wider if precision == "fp16" else None,
        )

    def _wider(self, name: PartName) -> tuple[PlannedPart, VaePrecision]:
        """Return the part in fp32, or in bf16 where that does not fit the budget."""
        frames, height, width = self.parts[name].like.shape[2:]
        reserved = device_bytes(self.rows[name], upper=True)

        def planned(precision: VaePrecision) -> tuple[PlannedPart, VaePrecision]:
            report_phase(self.progress, "load", f"{self.settings.model} in {precision}")
            wide = _load(self.settings, self.autoencoder.budget, precision)
            return wide.plan(name, (frames, height, width), reserved=reserved), precision

        try:
            return planned("fp32")
        except BudgetError:
            return planned("bf16")


def _load(settings: VaeSettings, budget: Budget, precision: VaePrecision) -> ClipAutoencoder:
    assert settings.model is not None
    return load_clip_autoencoder(
        settings.model, budget, dtype=DTYPES[precision], scratch=settings.scratch
    )


def _reader_of(latents: Tensor) -> ReadChunk:
    """Return what reads the next latents."""
    done = 0

    def read(count: int) -> Tensor:
        nonlocal done
        done += count
        return latents[:, :, done - count : done]

    return read
