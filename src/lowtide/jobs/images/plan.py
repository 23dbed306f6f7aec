"""Plans of a job on images, on this machine or for a device that is not present."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lowtide.core.errors import LowtideError, ModelError, UsageError
from lowtide.core.option import Precision
from lowtide.core.progress import Cancel, ProgressCallback, raise_if_cancelled
from lowtide.jobs.engine.devices import castable_precisions, preferred_precision, resolve_device
from lowtide.jobs.engine.journal import JobJournal, open_journal
from lowtide.jobs.engine.report import SkippedInput, versions_used
from lowtide.jobs.engine.results import ResultRecorder
from lowtide.jobs.images.build_network import ensemble_network, to_memory_format
from lowtide.jobs.images.job import ImageJob
from lowtide.jobs.images.prepare import load_model, load_prepared_model
from lowtide.jobs.images.prepared import PinnedFirstRun, PreparedModel
from lowtide.jobs.images.settings import ImageSettings
from lowtide.jobs.images.whole_image import whole_image
from lowtide.media import ImageFacts
from lowtide.media.discover import DiscoveredFiles, FilePair
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
        replace(settings, precision="fp32", cuda_graphs=False),
        device="cpu",
        progress=progress,
        on_loaded=on_loaded,
    )
    precision = _precision(settings.precision, reference.descriptor, profile)
    network = replace(
        reference.network, device=profile.name, precision=precision, channels_last=False
    )
    weight_bytes = reference.costs.weight_bytes  # fp32 weights are resident too: the reference
    if precision != "fp32":
        low = load_model(settings).to_low_precision(DTYPES[precision])
        network = replace(network, forward=low.module)
        if settings.self_ensemble:
            network = ensemble_network(network)
        network = to_memory_format(network, low, takes_channels_last(network))
        weight_bytes += low.descriptor.weight_bytes
    costs = _costs(reference, network, profile, weight_bytes)
    return replace(
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


@dataclass(frozen=True)
class ImageWork:
    """Images of a job and what is decided about them: ``facts`` are those of a single one."""

    job_type: type[ImageJob]
    settings: ImageSettings
    found: DiscoveredFiles
    facts: ImageFacts | None
    scratch: Path
    plan_file: PlanFile | None
    progress: ProgressCallback | None
    cancel: Cancel

    @property
    def pairs(self) -> list[FilePair]:
        """The images and their targets."""
        return self.found.pairs

    def check_scale(self, scale: int) -> None:
        """Check the result's size for a model of this ``scale``.

        It is called before anything is measured, which may take minutes. For a single image it
        raises what `ImageJob.target_size` raises; of several images the valid ones are run.
        """
        if len(self.pairs) == 1:
            (pair,) = self.pairs
            self.job_type.target_size(pair.source, pair.target, self.settings, scale, self.facts)

    def budget(self, devices: Sequence[str], pin: PinnedFirstRun | None) -> Budget:
        """Return the budget of the device that has the least, or that of the first run."""
        budget = min(
            (self.settings.parse_budget(one, self.scratch) for one in dict.fromkeys(devices)),
            key=lambda one: one.device_bytes,
        )
        return budget if pin is None else pin.pinned_budget(self.settings.budget, budget)

    def recorder(
        self,
        prepared: PreparedModel,
        device: str,
        why: str,
        journal: JobJournal | None,
        *,
        force: bool,
        sidecar: bool,
    ) -> ResultRecorder:
        """Return what records the items in a new report, with what determines a result's bytes.

        ``why`` says why the model of the settings was chosen.
        """
        report = self.job_type.report_type(
            model=prepared.descriptor.to_dict(),
            model_choice=why,
            device=device,
            versions=versions_used(self.settings.model_name, self.job_type.packages),
            skipped_inputs=SkippedInput.of(self.found),
        )
        made_by = prepared.descriptor.sha256, prepared.precision
        return ResultRecorder(
            self.pairs,
            report,
            journal,
            self.settings.content_hash(*made_by),
            force=force,
            sidecar=sidecar,
            made_with=self.settings.made_with(*made_by),
        )


@dataclass(frozen=True)
class ImagePlan(ImageWork):
    """Images and how they would be run: nothing is computed or written but reports."""

    def report(self, folder: Path | None, *, force: bool, sidecar: bool) -> Any:
        """Plan what is due and return the report; ``folder`` has the journal, if there is one."""
        with open_journal(folder, read_only=True) as journal:
            before = () if journal is None else journal.models
            settings, why = self.job_type.suited(self.settings, self.pairs, before)
            work = replace(self, settings=settings)
            now = versions_used(settings.model_name, self.job_type.packages)
            job = work.load(PinnedFirstRun.read(journal, now))
            prepared = job.prepared
            results = work.recorder(
                prepared, prepared.network.device, why, journal, force=force, sidecar=sidecar
            )
            for item in results.due_items():
                raise_if_cancelled(self.cancel)
                try:
                    results.record(item.index, job.item_report(item, job.plan(item), "planned"))
                except LowtideError as error:
                    results.failed(item.index, error)
        return results.report

    def load(self, pin: PinnedFirstRun | None) -> ImageJob:
        """Load the model on the device of the settings, which may be absent."""
        settings = self.settings
        profile = profile_if_absent(settings.device)
        if profile is not None:
            budget = Budget.for_profile(profile, settings.budget)
            prepared = load_for_profile(settings, profile, self.progress, self.check_scale)
        else:
            (device,) = map(resolve_device, settings.device_names[:1])
            budget = self.budget([device], pin)
            self.job_type.load_libraries(settings)
            meter = open_meter(device)
            meter.start()
            try:
                prepared = load_prepared_model(
                    settings,
                    device=device,
                    limit_bytes=budget.device_bytes // 2,
                    known=pin and pin.measured,
                    replayed=self.plan_file and self.plan_file.first,
                    meter=meter,
                    progress=self.progress,
                    cancel=self.cancel,
                    runs_job=False,
                    on_loaded=self.check_scale,
                    whole=whole_image(self.job_type, settings, budget, self.pairs, self.facts),
                )
            finally:
                meter.stop()
        return self.job_type(
            prepared, settings, budget, plan_file=self.plan_file, images=len(self.pairs)
        )


def profile_if_absent(device: str) -> DeviceProfile | None:
    """Return the profile that ``device`` names, or None for a device of this machine.

    Raises:
        UsageError: The name is neither.
    """
    here = device == "auto" or device.partition(":")[0] in ("cpu", "cuda")
    return None if here else load_profile(device)
