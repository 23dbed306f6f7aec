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
    OutOfMemoryError,
    OutputError,
    UsageError,
)
from lowtide.core.progress import Progress

if TYPE_CHECKING:
    from lowtide.jobs.plan_upscale import plan
    from lowtide.jobs.report import UpscaleReport
    from lowtide.jobs.upscale import upscale
    from lowtide.memory.budget import Budget
    from lowtide.memory.plan import Plan
    from lowtide.models.loader import load

__all__ = [
    "BatchError",
    "Budget",
    "BudgetError",
    "Cancelled",
    "ImageError",
    "InputError",
    "LowtideError",
    "ModelError",
    "OutOfMemoryError",
    "OutputError",
    "Plan",
    "Progress",
    "UpscaleReport",
    "UsageError",
    "__version__",
    "load",
    "plan",
    "upscale",
]

_HOMES = {
    "Budget": "lowtide.memory.budget",
    "Plan": "lowtide.memory.plan",
    "UpscaleReport": "lowtide.jobs.report",
    "load": "lowtide.models.loader",
    "plan": "lowtide.jobs.plan_upscale",
    "upscale": "lowtide.jobs.upscale",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
