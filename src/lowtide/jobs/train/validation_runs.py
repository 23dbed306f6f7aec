"""Runs of a job on validation images, with the weights of a training that goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lowtide.core.errors import LowtideError
from lowtide.core.input_file import file_sha256
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.engine.report import ItemReport
from lowtide.jobs.images.job import ImageJob
from lowtide.jobs.images.prepare import import_job_libraries, load_prepared_model
from lowtide.jobs.images.prepared import PlanMeasurements
from lowtide.jobs.images.settings import ImageSettings
from lowtide.memory.meter import open_meter

Pictures = Iterable[tuple[Path, Path]]
"""Source and target of each image."""


class ValidationRunner:
    """Run images as `lowtide.upscale` or `lowtide.denoise` do, on ``device``.

    The network's costs are measured with the first weights: memory, time and receptive field follow
    from its layers, which stay the same during a training run.
    """

    def __init__(self, job_type: type[ImageJob], device: str) -> None:
        self._job_type, self._device = job_type, device
        self._measured: PlanMeasurements | None = None

    def __call__(self, weights: Path, runs: Sequence[tuple[ImageSettings, Pictures]]) -> None:
        """Run the pictures of each settings, which name ``weights`` and one budget.

        Existing targets are replaced. Raises as `lowtide.upscale`.
        """
        first = runs[0][0]
        import_job_libraries(first)
        meter = open_meter(self._device)
        meter.start()
        try:
            budget = first.parse_budget(self._device, weights.parent)
            known = self._measured and self._measured.of_weights(file_sha256(weights))
            prepared = load_prepared_model(
                first,
                device=self._device,
                limit_bytes=budget.device_bytes // 2,
                known=known,
                meter=meter,
            )
            self._measured = prepared.measurements
            for settings, pictures in runs:
                job = self._job_type(prepared, settings, budget)
                JobPipeline(job, _Strict(), meter, scratch=weights.parent).run(
                    JobItem(source, target, index)
                    for index, (source, target) in enumerate(pictures, start=1)
                )
        finally:
            meter.stop()


class _Strict:
    """Result listener that raises the error of a failed item."""

    def new_part(self, index: int) -> None:
        pass

    def begin(self, index: int) -> None:
        pass

    def done(self, index: int, item: ItemReport) -> None:
        pass

    def failed(self, index: int, error: LowtideError) -> None:
        raise error
