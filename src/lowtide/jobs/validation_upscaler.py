"""Upscale images with changing weights of the same network."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lowtide.core.errors import LowtideError
from lowtide.core.hashing import file_sha256
from lowtide.jobs.image_queue import ImageQueue
from lowtide.jobs.job_monitor import JobMonitor
from lowtide.jobs.prepare import preload_libraries
from lowtide.jobs.report import ImageReport
from lowtide.jobs.session import UpscaleSession
from lowtide.jobs.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts
from lowtide.memory.meter import open_meter


class ValidationUpscaler:
    """Upscale images as `lowtide.upscale` does, within ``budget`` on ``device``.

    The network's costs are measured with the first weights: memory, time and receptive field follow
    from its layers, which stay the same during a training run.
    """

    def __init__(self, budget: str, device: str) -> None:
        self._budget, self._device = budget, device
        self._costs: ModelCosts | None = None

    def __call__(self, weights: Path, pictures: Iterable[tuple[Path, Path]]) -> None:
        """Upscale each of ``pictures``, (source, target), with ``weights``.

        Existing targets are replaced. Raises as `lowtide.upscale`.
        """
        settings = UpscaleSettings.of(model=str(weights), device=self._device)
        preload_libraries(settings)
        monitor = JobMonitor(open_meter(self._device), None, None)
        monitor.meter.start()
        try:
            budget = Budget.parse(self._budget, device=self._device, scratch=weights.parent)
            known = self._costs
            if known is not None:
                known = known.model_copy(update={"sha256": file_sha256(weights)})
            prepared = monitor.prepare(settings, self._device, budget, None, known)
            self._costs = prepared.costs
            images = ImageQueue(
                UpscaleSession(
                    prepared, settings, budget, monitor.meter, None, None, weights.parent
                ),
                _Strict(),
            )
            try:
                for index, (source, target) in enumerate(pictures, start=1):
                    images.submit(source, target, index)
                images.finish()
            finally:
                images.abort()
        finally:
            monitor.meter.stop()


class _Strict:
    """Result listener that raises the error of a failed image."""

    def new_part(self, index: int) -> None:
        pass

    def begin(self, index: int) -> None:
        pass

    def done(self, index: int, image: ImageReport) -> None:
        pass

    def failed(self, index: int, error: LowtideError) -> None:
        raise error
