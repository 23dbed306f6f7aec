"""A captured program for one image size, with layout and certificate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import torch
from torch import nn

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.heap import trim_heap
from lowtide.core.scratch import ScratchSpace
from lowtide.core.signal import RowSink, RowSource, ValueAdapter
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.budget import Budget
from lowtide.memory.oom import HeapLimiter
from lowtide.memory.process_memory import anonymous_bytes
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.python_place import AttributeKey
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.capture.opaque_module import OpaqueModuleOp
from lowtide.streaming.capture.outputs import Repack
from lowtide.streaming.certificate import StreamCertificate
from lowtide.streaming.engine.executor import BandExecutor, OutputRows
from lowtide.streaming.engine.placement import PagePlacement, page_factory
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.source_run import IdentityAdapter, run_source
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from lowtide.streaming.pages.page import input_pages
from lowtide.streaming.planner.layout_search import StreamLayout
from lowtide.streaming.planner.stream_planner import HeldBytes, StreamPlanner
from lowtide.streaming.planning_memory import plan_kept_bytes, warn_beyond, whole_run_budget

_SPILL_LABELS = {"host": " on the host", "disk": " on disk"}
# Share of the budget for what the heap keeps and libraries allocate in addition to rows. Smaller on
# a GPU, where the allocator is simulated; without this, nine runs on an H200 took 1.00 to 1.01 of
# the budget.
_SHARE, _SHARE_ON_GPU, _LEAST = 0.1, 0.05, 16 * MIB


@dataclass(frozen=True)
class StreamSettings:
    """Settings of a streamed module: budget, pages, scratch folder.

    ``held`` returns the bytes that inputs and results take for a layout (program, segments, bands);
    by default all are held whole. ``profile`` is the device to plan for, if it is not here.
    """

    budget: str | int | Budget
    pages: PagePlacement
    scratch: ScratchSpace
    certified: bool
    held: HeldBytes | None = None
    profile: DeviceProfile | None = None


@dataclass(frozen=True)
class PreparedStream:
    """A program for one image size, its layout, and its certificate.

    ``fingerprint`` is the module's fingerprint at capture; the attributes in
    ``written_attributes``, which the run itself sets, are ignored.
    """

    program: StreamProgram
    layout: StreamLayout
    executor: BandExecutor
    device: torch.device
    certificate: StreamCertificate | None
    fingerprint: ModuleFingerprint
    written_attributes: Set[AttributeKey]
    # By shapes of the tensors, for the batches whose images were proven independent.
    batch_repack: dict[object, Repack] = field(default_factory=dict)

    def matches(self, fingerprint: ModuleFingerprint) -> bool:
        """Return whether the module is unchanged since capture."""
        return self.fingerprint.matches(fingerprint, self.written_attributes)

    @property
    def output_places(self) -> list[int]:
        """By tensor that the module returns its position among the program's results."""
        return [self.program.outputs.index(one) for one in self.program.graph.outputs]

    def run(self, inputs: ModelInputs) -> Iterator[OutputRows]:
        """Run one sample by bands; on a CPU the heap keeps little of them."""
        pages, before_step = input_pages(inputs), None
        if self.device.type == "cpu":
            trim_heap()  # what planning or another call left would hide what this one adds
            before = anonymous_bytes()
            limit = HeapLimiter(lambda: anonymous_bytes() - before, self.layout.peak_bytes)
            before_step = limit.make_room
        return self.executor.run(pages, inputs.fixed, before_step=before_step)

    def run_source(
        self, source: RowSource, sink: RowSink, adapter: ValueAdapter | None = None
    ) -> None:
        """Run a source along its leading axis, band by band, into a sink.

        For a module of one input (B, C, N, ...) and one result, streamed along N: the source
        (N, ..., C) and the result are never held as a whole. By default they are floats as the
        module takes and returns them. Raises `UsageError` for a module of another kind, and as
        `run_source`.
        """
        program = self.program
        ends = *program.graph.inputs, *program.outputs
        dims = [program.rows[one].dim if one in program.rows else None for one in ends]
        if dims != [2, 2] or program.graph.fixed:
            raise UsageError(
                "sources are for modules of one input (B, C, N, ...) and one result, along N",
                hint="stream the module with axis=2",
            )
        channels = program.graph.nodes[program.output].meta.shape[1]
        given = adapter or IdentityAdapter(channels)
        run_source(self.executor, program, source, sink, given, device=self.device)

    @property
    def upper_bytes(self) -> int:
        """Smallest budget for this layout: its rows, and what the heap keeps in addition."""
        return _smallest_budget(self.layout.peak_bytes, self.device)

    @property
    def title(self) -> str:
        """Description for the user: how the program runs and what its rows take."""
        layout = self.layout
        pages = format_bytes(layout.pages_bytes) if layout.pages_bytes else "nothing"
        away = _SPILL_LABELS.get(layout.placement, "") if layout.pages_bytes else ""
        if layout.resident:
            away = f", {format_bytes(layout.spilled_peak_bytes)} of them{away}"
        return (
            f"streamed, segments: {len(layout.segments)}, bands: up to {max(layout.bands)},"
            f" {format_bytes(layout.peak_bytes)} for rows and result with {pages} of pages{away}"
            f"{self._opaque_title}{self._planning_title}"
        )

    @property
    def _planning_title(self) -> str:
        if self.device.type != "cpu":
            return ""
        return f"; planning leaves about {format_bytes(plan_kept_bytes(len(self.program.steps)))}"

    @property
    def _opaque_title(self) -> str:
        """Describe the modules run as they are, and the halo each reads around a band."""
        found = [
            f"{node.target.name} (halo {node.target.halo} rows)"
            for node in self.program.graph.nodes
            if isinstance(node.target, OpaqueModuleOp)
        ]
        return f"; not captured, halo measured: {', '.join(found)}" if found else ""


def _room_for_rows(allowed: int, device: torch.device, kept: int = 0) -> int:
    """Return the bytes that a budget leaves for rows, where planning leaves ``kept`` bytes."""
    return allowed - max(_LEAST, int(allowed * _reserved_share(device)) + kept)


def _smallest_budget(rows: int, device: torch.device, kept: int = 0) -> int:
    """Return the smallest budget that leaves ``rows`` bytes for rows."""
    return max(rows + _LEAST, math.ceil((rows + kept) / (1 - _reserved_share(device))) + 1)


def _reserved_share(device: torch.device) -> float:
    return _SHARE if device.type == "cpu" else _SHARE_ON_GPU


def prepare_stream(
    module: nn.Module,
    inputs: ModelInputs,
    settings: StreamSettings,
    known: StreamPlanner | None = None,
) -> PreparedStream:
    """Capture, lay out and certify ``module`` for inputs like these.

    A planner of its program that is ``known`` is used. Raises as `Streamed` does.
    """
    image = inputs.first
    on_cpu = image.device.type == "cpu"
    if on_cpu and settings.pages == "host":
        raise UsageError("on a CPU, pages are in host memory anyway", hint="pages='memory'")
    planner = known or StreamPlanner(
        module, inputs, pages=settings.pages, whole_image=settings.held is None
    )
    program = planner.program
    if on_cpu and known is None:
        trim_heap(collect=True)  # half of the memory of a capture is garbage by now
        planner.budget_bytes = _allowed_bytes(settings.budget, image.device, settings.profile)
    layout = _choose_layout(planner, inputs, settings)
    certificate = planner.certificate if settings.certified else None
    make_page = page_factory(
        program, layout.placement, image.device, settings.scratch, resident=layout.resident
    )
    executor = BandExecutor(program, layout.segments, layout.bands, make_page)
    return PreparedStream(
        program,
        layout,
        executor,
        image.device,
        certificate,
        ModuleFingerprint(module),
        program.graph.written_attributes,
    )


def available_bytes(
    budget: str | int | Budget, device: torch.device, profile: DeviceProfile | None = None
) -> int:
    """Return the bytes that a budget leaves for what a run adds to weights and input.

    They are those of the device, or of the one of ``profile``.
    """
    return _room_for_rows(_allowed_bytes(budget, device, profile), device)


def _allowed_bytes(
    budget: str | int | Budget, device: torch.device, profile: DeviceProfile | None
) -> int:
    if profile is not None:
        return Budget.for_profile(profile, budget).device_bytes
    name = "cpu" if device.type == "cpu" else str(device)
    return Budget.parse(budget, device=name).device_bytes


def _choose_layout(
    planner: StreamPlanner, inputs: ModelInputs, settings: StreamSettings
) -> StreamLayout:
    """Return the layout within the budget, if there is one beside what planning leaves."""
    device = inputs.first.device
    allowed = _allowed_bytes(settings.budget, device, settings.profile)
    kept = 0 if planner.budget_bytes is None else plan_kept_bytes(len(planner.program.steps))
    room = _room_for_rows(allowed, device, kept)
    try:
        try:
            layout = planner.choose(room, settings.held)
        except BudgetError:
            layout = planner.choose(_room_for_rows(allowed, device), settings.held)
    except BudgetError as error:
        least = _smallest_budget(error.smallest or 0, device, kept)
        whole = whole_run_budget(planner.program.graph)
        instead, hint = "", f"a budget of {-(-least // MIB)}MiB"
        if whole < least:
            instead = f", and the model itself about {format_bytes(whole)}"
            hint = f"call the model itself, without streaming; or {hint}"
        raise BudgetError(
            f"this model cannot be streamed in {format_bytes(allowed)}: its bands and its result"
            f" need at least {format_bytes(least)}{instead}",
            smallest=least,
            hint=hint,
        ) from error
    if layout.peak_bytes > room:
        title = f"the first call of this {type(planner.module).__name__} with its planning"
        warn_beyond(allowed, _smallest_budget(layout.peak_bytes, device, kept), title)
    return layout
