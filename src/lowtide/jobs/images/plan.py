"""Plan what a job on images would do, on this machine or on a device that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.core.errors import LowtideError
from lowtide.core.progress import Cancel, ProgressCallback, raise_if_cancelled
from lowtide.jobs.engine.journal import JobJournal, open_journal
from lowtide.jobs.engine.report import SkippedInput
from lowtide.jobs.engine.results import ResultRecorder
from lowtide.jobs.images.job import ImageJob
from lowtide.jobs.images.prepared import PinnedFirstRun, PreparedModel
from lowtide.jobs.images.runtime import devices_of, load_prepared_model, runtime_versions
from lowtide.jobs.images.settings import ImageSettings
from lowtide.jobs.images.whole_image import whole_image
from lowtide.media import ImageFacts
from lowtide.media.discover import DiscoveredFiles, FilePair
from lowtide.memory.budget import Budget
from lowtide.memory.meter import open_meter
from lowtide.memory.plan_file import PlanFile
from lowtide.memory.profiles import DeviceProfile, load_profile


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
            versions=runtime_versions(self.settings, self.job_type.packages),
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
            now = runtime_versions(settings, self.job_type.packages)
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
            from lowtide.jobs.images.absent_device import load_for_profile

            prepared = load_for_profile(settings, profile, self.progress, self.check_scale)
        else:
            device = devices_of(settings)[0]
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
