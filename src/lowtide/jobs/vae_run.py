"""One run of a video autoencoder: its model, the time of its phases, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from lowtide.core.errors import NotFiniteError
from lowtide.core.progress import Cancel, Progress, ProgressCallback, check_cancel, report_phase
from lowtide.integrations.clip_autoencoder import ClipAutoencoder, load_clip_autoencoder
from lowtide.jobs.devices import resolve_device
from lowtide.jobs.vae_report import VaeReport
from lowtide.jobs.vae_settings import VaeSettings
from lowtide.memory.budget import Budget

if TYPE_CHECKING:
    from torch import Tensor

AfterSome = Callable[..., None]


@dataclass
class VaeRun:
    """One call of a job: its model, its clock and who is told."""

    settings: VaeSettings
    autoencoder: ClipAutoencoder
    progress: ProgressCallback | None
    cancel: Cancel
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, settings: VaeSettings, progress: ProgressCallback | None, cancel: Cancel) -> Self:
        """Load the model of ``settings``."""
        assert settings.model is not None
        device = resolve_device(settings.device)
        budget = Budget.parse(settings.budget, device=device, scratch=settings.scratch)
        report_phase(progress, "load", str(settings.model))
        autoencoder = load_clip_autoencoder(settings.model, budget, scratch=settings.scratch)
        return cls(settings, autoencoder, progress, cancel)

    @contextmanager
    def phase(self, name: str, title: str, total: int, unit: str = "frames") -> Iterator[AfterSome]:
        """Time a phase, and yield what is called with the number of frames it has done more."""
        started, done = time.perf_counter(), 0

        def after_some(count: int = 1) -> None:
            nonlocal done
            done += count
            check_cancel(self.cancel)
            if self.progress is not None:
                elapsed = time.perf_counter() - started
                self.progress(Progress("run", title, done, total, elapsed=elapsed, unit=unit))

        check_cancel(self.cancel)
        yield after_some
        self.seconds[name] = round(time.perf_counter() - started, 3)

    def encode(self, clip: Tensor, name: str, count: int) -> Tensor:
        """Return the ``count`` latents of a clip."""
        import torch

        report_phase(self.progress, "capture", f"encoding {name}")
        with self.phase("encode", f"encoding {name}", count, "latents") as after_chunks:
            latents = self.autoencoder.encode(
                clip,
                sample=self.settings.sample,
                seed=self.settings.seed,
                after_chunks=after_chunks,
            )
        if not torch.isfinite(latents).all():
            raise NotFiniteError(
                "the model made latents that are not finite", hint="the weights may be damaged"
            )
        return latents

    def decode(self, latents: Tensor, name: str) -> Tensor:
        """Return all frames of latents."""
        number, height, width = latents.shape[2:]
        frames, _, _ = self.autoencoder.made((number, height, width))
        report_phase(self.progress, "capture", f"decoding {name}")
        with self.phase("decode", f"decoding {name}", frames) as after_chunks:
            return self.autoencoder.decode(latents, after_chunks)

    def report(self, **values: Any) -> VaeReport:
        """Return the report; ``values`` are what is not known of the run."""
        done, settings = self.autoencoder, self.settings
        posterior = {}
        if values["operation"] != "decode":
            sampled = settings.sample
            posterior = {
                "posterior": "sample" if sampled else "mean",
                "seed": settings.seed if sampled else None,
            }
        return VaeReport(
            model=done.kind,
            budget_bytes=done.budget.device_bytes,
            device=done.budget.device,
            scaling=done.scaling,
            seconds=self.seconds,
            **posterior,
            **values,
        )
