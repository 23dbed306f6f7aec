"""Dry run of a job on images, on this machine or on a device that is not present."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lowtide.core.errors import LowtideError, ModelError, UsageError
from lowtide.core.option import Precision
from lowtide.core.progress import Cancel, ProgressCallback, raise_if_cancelled
from lowtide.jobs.engine.devices import castable_precisions, preferred_precision, resolve_device
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.engine.report import SkippedInput, versions_used
from lowtide.jobs.images.build_network import ensemble_network, to_memory_format
from lowtide.jobs.images.job import ImageJob
from lowtide.jobs.images.prepare import load_model, load_prepared_model
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.jobs.images.run import Inputs, find_jobs, scale_checker
from lowtide.jobs.images.settings import ImageSettings
from lowtide.jobs.images.whole_image import whole_image
from lowtide.media.discover import FilePair
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts, ProbePoint, TracedPoint
from lowtide.memory.meter import open_meter
from lowtide.memory.plan_file import PlanFile
from lowtide.memory.prediction.operator_costs import roofline_seconds
from lowtide.memory.profiles import DeviceProfile, load_profile
from lowtide.models import ModelDescriptor
from lowtide.streaming.probe.trace_memory import live_bytes_rows, predict_tile_memory
from lowtide.streaming.specialize import require_cuda_graphs
from lowtide.streaming.tiles.grid import round_up
from lowtide.streaming.tiles.tile_step import DTYPES, RunnableNetwork, takes_channels_last

_SIDES = (128, 256, 512, 1024)


def load_for_profile(
    settings: ImageSettings,
    profile: DeviceProfile,
    progress: ProgressCallback | None = None,
    on_loaded: Callable[[int], object] = lambda scale: None,
) -> PreparedModel:
    """Return the model of ``settings`` with its costs predicted for ``profile``.

    The receptive field and the effect of the batch size are measured on the CPU once and then
    cached; memory comes from traces, seconds from the profile's rates.

    Args:
        progress: As in `load_prepared_model`.
        on_loaded: As in `load_prepared_model`.

    Raises:
        ModelError: The model cannot be traced.
        UsageError: The model or the device lacks the requested precision.
    """
    if settings.cuda_graphs:
        require_cuda_graphs(profile.kind)
    reference = load_prepared_model(
        dataclasses.replace(settings, precision="fp32", cuda_graphs=False),
        device="cpu",
        progress=progress,
        on_loaded=on_loaded,
    )
    precision = _precision(settings.precision, reference.descriptor, profile)
    network = dataclasses.replace(
        reference.network, device=profile.name, precision=precision, channels_last=False
    )
    weight_bytes = reference.costs.weight_bytes  # fp32 weights are resident too: the reference
    if precision != "fp32":
        low = load_model(settings).to_low_precision(DTYPES[precision])
        network = dataclasses.replace(network, forward=low.module)
        if settings.self_ensemble:
            network = ensemble_network(network)
        network = to_memory_format(network, low, takes_channels_last(network))
        weight_bytes += low.descriptor.weight_bytes
    costs = _costs(reference, network, profile, weight_bytes)
    return dataclasses.replace(
        reference,
        network=network,
        costs=costs,
        precision=precision,
        bounds={},
    )


def _costs(
    reference: PreparedModel, network: RunnableNetwork, profile: DeviceProfile, weight_bytes: int
) -> ModelCosts:
    shape = reference.geometry
    points, traced = [], []
    for side in sorted({round_up(max(side, shape.minimum), shape.align) for side in _SIDES}):
        tile_trace = predict_tile_memory(network, side, side, device=profile)
        if tile_trace.trace is None:
            raise ModelError(
                f"{reference.descriptor.name} cannot be traced, so its memory on {profile.title}"
                " cannot be predicted",
                hint="run `lowtide plan` on that machine, where it is measured instead",
            )
        live = sum(live_bytes_rows(network, tile_trace.ledger))
        kept = next(row.value for row in tile_trace.ledger if row.name == "allocator")
        seconds = roofline_seconds(tile_trace.trace, profile)
        traced.append(TracedPoint(pixels=side * side, peak_bytes=live, reused_blocks=()))
        points.append(
            ProbePoint(
                pixels=side * side, peak_bytes=live, resident_bytes=live + kept, seconds=seconds
            )
        )
    return reference.costs.model_copy(
        update={
            "device": profile.name,
            "precision": network.precision,
            "channels_last": network.channels_last,
            "weight_bytes": weight_bytes,
            "context_bytes": profile.context_bytes,
            "points": tuple(points),
            "traced_points": tuple(traced),
        }
    )


def _precision(
    requested: Literal["auto"] | Precision, model: ModelDescriptor, profile: DeviceProfile
) -> Precision:
    """Return the requested precision, or the lowest that device and model gain from."""
    if requested == "auto":
        return "fp32" if profile.kind == "cpu" else preferred_precision(model, profile.capability)
    allowed = castable_precisions(model)
    if requested not in allowed or requested not in profile.supports:
        where = model.name if requested not in allowed else profile.title
        raise UsageError(f"{where} does not run in {requested}", hint="--precision auto")
    return requested


def plan_images(
    job_type: type[ImageJob],
    chosen: ImageSettings,
    inputs: Inputs,
    output: str | Path,
    *,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> Any:
    """Plan what `run_images` would do, and return the report of the type; runs nothing.

    Arguments and errors are those of `lowtide.plan`.
    """
    found, _ = find_jobs(inputs, output, chosen, job_type)
    pairs = found.pairs
    chosen, why = job_type.suited(chosen, pairs)
    plan_file = PlanFile.read(chosen.plan_file) if chosen.plan_file else None
    job = _load_job(job_type, chosen, pairs, plan_file, Path(output), progress, cancel)
    report = job_type.report_type(
        model=job.prepared.descriptor.to_dict(),
        model_choice=why,
        device=job.prepared.network.device,
        versions=versions_used(chosen.model_name, job_type.packages),
        skipped_inputs=SkippedInput.of(found),
    )
    for index, pair in enumerate(pairs, start=1):
        raise_if_cancelled(cancel)
        item = JobItem(pair.source, pair.target, index)
        try:
            report.items.append(job.item_report(item, job.plan(item), "planned"))
        except LowtideError as error:
            if len(pairs) == 1:
                raise
            report.items.append(report.item_type.of_failure(pair.source, pair.target, error))
    return report


def _load_job(
    job_type: type[ImageJob],
    settings: ImageSettings,
    pairs: list[FilePair],
    plan_file: PlanFile | None,
    output: Path,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> ImageJob:
    """Load the model on the device of ``settings``, which may be absent."""
    profile, check = (
        profile_if_absent(settings.device),
        scale_checker(job_type, pairs, settings),
    )
    if profile is not None:
        budget = Budget.for_profile(profile, settings.budget)
        prepared = load_for_profile(settings, profile, progress, check)
    else:
        (device,) = map(resolve_device, settings.device_names[:1])
        budget = settings.parse_budget(device, settings.scratch or output)
        job_type.load_libraries(settings)
        meter = open_meter(device)
        meter.start()
        try:
            prepared = load_prepared_model(
                settings,
                device=device,
                limit_bytes=budget.device_bytes // 2,
                replayed=plan_file and plan_file.first,
                meter=meter,
                progress=progress,
                cancel=cancel,
                runs_job=False,
                on_loaded=check,
                whole=whole_image(job_type, settings, budget, pairs, None),
            )
        finally:
            meter.stop()
    return job_type(prepared, settings, budget, plan_file=plan_file, images=len(pairs))


def profile_if_absent(device: str) -> DeviceProfile | None:
    """Return the profile that ``device`` names, or None for a device of this machine.

    Raises:
        UsageError: The name is neither.
    """
    here = device == "auto" or device.partition(":")[0] in ("cpu", "cuda")
    return None if here else load_profile(device)
