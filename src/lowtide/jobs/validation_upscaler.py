"""Upscale images with changing weights of the same network."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lowtide.core.errors import LowtideError
from lowtide.core.hashing import file_sha256
from lowtide.jobs.item import Item
from lowtide.jobs.pipeline import Pipeline
from lowtide.jobs.prepare import preload_libraries, prepare
from lowtide.jobs.prepared import Measurements
from lowtide.jobs.report import ItemReport
from lowtide.jobs.upscale_job import UpscaleJob
from lowtide.jobs.upscale_settings import UpscaleSettings
from lowtide.memory.meter import open_meter


class ValidationUpscaler:
    """Upscale images as `lowtide.upscale` does, within ``budget`` on ``device``.

    The network's costs are measured with the first weights: memory, time and receptive field follow
    from its layers, which stay the same during a training run.
    """

    def __init__(self, budget: str, device: str) -> None:
        self._budget, self._device = budget, device
        self._measured: Measurements | None = None

    def __call__(self, weights: Path, pictures: Iterable[tuple[Path, Path]]) -> None:
        """Upscale each of ``pictures``, (source, target), with ``weights``.

        Existing targets are replaced. Raises as `lowtide.upscale`.
        """
        settings = UpscaleSettings.of(model=str(weights), device=self._device, budget=self._budget)
        preload_libraries(settings)
        meter = open_meter(self._device)
        meter.start()
        try:
            budget = settings.parse_budget(self._device, weights.parent)
            known = self._measured and self._measured.of_weights(file_sha256(weights))
            prepared = prepare(
                settings,
                device=self._device,
                limit_bytes=budget.device_bytes // 2,
                known=known,
                meter=meter,
            )
            self._measured = prepared.measurements
            job = UpscaleJob(prepared, settings, budget)
            Pipeline(job, _Strict(), meter, scratch=weights.parent).run(
                Item(source, target, index)
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
