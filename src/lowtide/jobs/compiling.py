"""Compiling a network where its plan says so, and remembering what it was worth."""

from __future__ import annotations

from lowtide.core.errors import ModelError
from lowtide.core.progress import Progress
from lowtide.core.units import format_seconds
from lowtide.jobs.computed import Work
from lowtide.jobs.context import Context
from lowtide.memory.plan import Plan
from lowtide.streaming.compiled import CompileStore, compile_for, load_compiler
from lowtide.streaming.executor import plan_axes
from lowtide.streaming.step import Network


def network_for(context: Context, work: Work, plan: Plan, notes: list[str]) -> Network:
    """The network as ``plan`` runs it, compiled for its tiles where it says so.

    Raises `ModelError` where that was asked for and cannot be; where only the plan chose it, the
    network runs as it is, and an event of ``work`` says why.
    """
    prepared = context.prepared
    if not plan.compiled:
        return prepared.network
    rows, columns = plan_axes(plan)
    shape = plan.batch * plan.images_per_tile, prepared.shape.in_channels, rows.tile, columns.tile
    if shape not in prepared.compiled:
        if context.progress is not None:
            context.progress(Progress("compile", prepared.descriptor.name))
        with context.meter.apart():
            load_compiler()
        before = context.meter.now_bytes
        try:
            network, facts = compile_for(prepared.network, shape)
        except ModelError as error:
            if context.settings.compile == "on":
                raise
            work.events.append(error.message)
            prepared.compiling = None  # the next image need not try
            return prepared.network
        if plan.device == "cpu":  # where host memory is metered
            known = prepared.compiling.host_bytes if prepared.compiling else 0
            taken = max(known, context.meter.peak_bytes - before)
            facts = facts.model_copy(update={"host_bytes": taken})
        CompileStore(plan.device).put(prepared.descriptor.sha256, plan.precision, facts)
        notes.append(
            f"compiling took {format_seconds(facts.warmup_seconds)}; a run then takes"
            f" {facts.ratio:.2f} of its time"
        )
        prepared.compiled[shape] = network
    return prepared.compiled[shape]
