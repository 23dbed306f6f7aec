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
from lowtide.streaming.tiles.grid import plan_axes
from lowtide.streaming.tiles.tile_step import NetworkSpec

Shape = tuple[int, ...]


def network_for(
    session: UpscaleSession, job: ImageJob, plan: Plan, notes: list[str]
) -> NetworkSpec:
    """Return the network as ``plan`` runs it: compiled, as a CUDA graph, or plain.

    What is specialized for a tile shape is cached, and the gain of compiling is stored. Where only
    the plan chose compiling and it fails, the plain network is returned, and an event of ``job``
    states why.

    Raises:
        ModelError: Compiling or recording was requested and fails.
    """
    prepared = session.prepared
    if not plan.compiled and not plan.cuda_graph:
        return prepared.network
    rows, columns = plan_axes(plan)
    shape = (
        plan.batch * plan.images_per_tile,
        prepared.geometry.in_channels,
        rows.tile,
        columns.tile,
    )
    if plan.cuda_graph:
        return _capture_graph(session, shape, notes)
    if shape not in prepared.compiled_networks:
        try:
            prepared.compiled_networks[shape] = _compile_network(session, plan, shape, notes)
        except ModelError as error:
            if session.settings.compile == "on":
                raise
            job.events.append(error.message)
            prepared.compile_gain = None  # skip it for the next image
            return prepared.network
    return prepared.compiled_networks[shape]


def _compile_network(
    session: UpscaleSession, plan: Plan, shape: Shape, notes: list[str]
) -> NetworkSpec:
    prepared = session.prepared
    _report_phase(session, "compile")
    with session.meter.excluding():
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
        known = prepared.compile_gain.host_bytes if prepared.compile_gain else 0
        facts = facts.model_copy(update={"host_bytes": max(known, meter.peak_bytes)})
    CompileCache(plan.device).put(prepared.descriptor.sha256, plan.precision, facts)
    notes.append(_gain_note("compiling", facts))
    return network


def _capture_graph(session: UpscaleSession, shape: Shape, notes: list[str]) -> NetworkSpec:
    """Record a CUDA graph, of one shape at a time: each holds memory while it exists."""
    known = session.prepared.graph_networks
    if shape not in known:
        known.clear()
        _report_phase(session, "record")
        known[shape], facts = cuda_graph_for(session.prepared.network, shape)
        notes.append(_gain_note("capturing a CUDA graph", facts))
    return known[shape]


def _report_phase(session: UpscaleSession, phase: Phase) -> None:
    if session.progress is not None:
        session.progress(Progress(phase, session.prepared.descriptor.name))


def _gain_note(what: str, gain: SpecializationGain) -> str:
    return (
        f"{what} took {format_seconds(gain.warmup_seconds)}; a run then takes"
        f" {gain.ratio:.2f} times as long"
    )
