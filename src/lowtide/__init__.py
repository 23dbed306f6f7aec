"""Lowtide: image models in the memory you have.

    import lowtide

    report = lowtide.upscale("photo.jpg", "large.png", budget="1GiB")
    print(report.images[0].memory.peak_bytes, report.images[0].accuracy.execution)

Everything here is loaded on first use, so importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowtide._version import __version__
from lowtide.core.errors import (
    BatchError,
    BudgetError,
    Cancelled,
    ImageError,
    InputError,
    LowtideError,
    ModelError,
    NotFiniteError,
    OutOfMemoryError,
    OutputError,
    UsageError,
    VideoError,
)

if TYPE_CHECKING:
    from lowtide.core.progress import Progress
    from lowtide.integrations.fit import fit, unfit
    from lowtide.integrations.vram_usage import estimate_vram_usage
    from lowtide.jobs.denoise.command import denoise
    from lowtide.jobs.denoise.report import DenoiseReport
    from lowtide.jobs.forecast.backtest import backtest
    from lowtide.jobs.forecast.command import Forecast, forecast
    from lowtide.jobs.upscale.command import upscale
    from lowtide.jobs.upscale.plan import plan
    from lowtide.jobs.upscale.report import UpscaleReport
    from lowtide.jobs.video.command import video
    from lowtide.jobs.video.report import VideosReport
    from lowtide.memory.budget import Budget
    from lowtide.memory.plan import Plan
    from lowtide.memory.prediction.estimate import Estimate, estimate
    from lowtide.memory.region import measure
    from lowtide.memory.tracing.steps import InferenceStep, TrainingStep
    from lowtide.models.loader import load
    from lowtide.streaming.api import Streamed, stream

__all__ = [
    "BatchError",
    "Budget",
    "BudgetError",
    "Cancelled",
    "DenoiseReport",
    "Estimate",
    "Forecast",
    "ImageError",
    "InferenceStep",
    "InputError",
    "LowtideError",
    "ModelError",
    "NotFiniteError",
    "OutOfMemoryError",
    "OutputError",
    "Plan",
    "Progress",
    "Streamed",
    "TrainingStep",
    "UpscaleReport",
    "UsageError",
    "VideoError",
    "VideosReport",
    "__version__",
    "backtest",
    "denoise",
    "estimate",
    "estimate_vram_usage",
    "fit",
    "forecast",
    "load",
    "measure",
    "plan",
    "stream",
    "unfit",
    "upscale",
    "video",
]

_MODULES = {
    "Budget": "lowtide.memory.budget",
    "DenoiseReport": "lowtide.jobs.denoise.report",
    "Estimate": "lowtide.memory.prediction.estimate",
    "Forecast": "lowtide.jobs.forecast.command",
    "InferenceStep": "lowtide.memory.tracing.steps",
    "Plan": "lowtide.memory.plan",
    "Progress": "lowtide.core.progress",
    "Streamed": "lowtide.streaming.api",
    "TrainingStep": "lowtide.memory.tracing.steps",
    "UpscaleReport": "lowtide.jobs.upscale.report",
    "VideosReport": "lowtide.jobs.video.report",
    "backtest": "lowtide.jobs.forecast.backtest",
    "denoise": "lowtide.jobs.denoise.command",
    "estimate": "lowtide.memory.prediction.estimate",
    "estimate_vram_usage": "lowtide.integrations.vram_usage",
    "fit": "lowtide.integrations.fit",
    "forecast": "lowtide.jobs.forecast.command",
    "load": "lowtide.models.loader",
    "measure": "lowtide.memory.region",
    "plan": "lowtide.jobs.upscale.plan",
    "stream": "lowtide.streaming.api",
    "unfit": "lowtide.integrations.fit",
    "upscale": "lowtide.jobs.upscale.command",
    "video": "lowtide.jobs.video.command",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
