"""Compile a network or capture it in a CUDA graph if its plan says so."""

from __future__ import annotations

from lowtide.core.errors import ModelError
from lowtide.core.progress import Phase, Progress
from lowtide.core.units import format_seconds
from lowtide.jobs.finish import ImageJob
from lowtide.jobs.session import UpscaleSession
from lowtide.memory.meter import open_meter
from lowtide.memory.plan import Plan
from lowtide.streaming.specialize.cuda_graph import cuda_graph_for
from lowtide.streaming.specialize.shape_specialized import SpecializationGain
from lowtide.streaming.specialize.torch_compile import CompileCache, compile_for, preload_compiler
from lowtide.streaming.tiles.runner import plan_axes
from lowtide.streaming.tiles.tile_step import NetworkSpec

Shape = tuple[int, ...]


def network_for(
    context: UpscaleSession, work: ImageJob, plan: Plan, notes: list[str]
) -> NetworkSpec:
    """Return the network as ``plan`` runs it: compiled, as a CUDA graph, or plain.

    What is specialized for a tile shape is cached, and the gain of compiling is stored. Where only
    the plan chose compiling and it fails, the plain network is returned, and an event of ``work``
    states why.

    Raises:
        ModelError: Compiling or recording was requested and fails.
    """
    prepared = context.prepared
    if not plan.compiled and not plan.recorded:
        return prepared.network
    rows, columns = plan_axes(plan)
    shape = plan.batch * plan.images_per_tile, prepared.shape.in_channels, rows.tile, columns.tile
    if plan.recorded:
        return _recorded(context, shape, notes)
    if shape not in prepared.compiled:
        try:
            prepared.compiled[shape] = _compiled(context, plan, shape, notes)
        except ModelError as error:
            if context.settings.compile == "on":
                raise
            work.events.append(error.message)
            prepared.compiling = None  # skip it for the next image
            return prepared.network
    return prepared.compiled[shape]


def _compiled(context: UpscaleSession, plan: Plan, shape: Shape, notes: list[str]) -> NetworkSpec:
    prepared = context.prepared
    _tell(context, "compile")
    with context.meter.apart():
        preload_compiler()
    # Meter from here, not from the start of the job: memory that a long-lived program has freed
    # since then would hide what compiling takes.
    meter = open_meter("cpu")
    meter.start()
    try:
        network, facts = compile_for(prepared.network, shape)
    finally:
        meter.stop()
    if plan.device == "cpu":  # host memory is metered on the CPU only
        known = prepared.compiling.host_bytes if prepared.compiling else 0
        facts = facts.model_copy(update={"host_bytes": max(known, meter.peak_bytes)})
    CompileCache(plan.device).put(prepared.descriptor.sha256, plan.precision, facts)
    notes.append(_gained("compiling", facts))
    return network


def _recorded(context: UpscaleSession, shape: Shape, notes: list[str]) -> NetworkSpec:
    """Record a CUDA graph, of one shape at a time: each holds memory while it exists."""
    known = context.prepared.recorded
    if shape not in known:
        known.clear()
        _tell(context, "record")
        known[shape], facts = cuda_graph_for(context.prepared.network, shape)
        notes.append(_gained("capturing a CUDA graph", facts))
    return known[shape]


def _tell(context: UpscaleSession, phase: Phase) -> None:
    if context.progress is not None:
        context.progress(Progress(phase, context.prepared.descriptor.name))


def _gained(what: str, facts: SpecializationGain) -> str:
    return (
        f"{what} took {format_seconds(facts.warmup_seconds)}; a run then takes"
        f" {facts.ratio:.2f} times as long"
    )
