"""Reports of jobs as plain data, for text, JSON and sidecar files."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel

from lowtide._version import __version__
from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import BatchError, BudgetError, InputError, LowtideError
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.torch_state import thread_count
from lowtide.core.units import MIB, format_bytes
from lowtide.media.discover import DiscoveredFiles
from lowtide.memory.plan import LedgerRow, Plan
from lowtide.models.model_files import is_onnx

REPORT_SUFFIX = ".lowtide.json"


def reported_db(psnr: float) -> float | None:
    """Round decibels for a report; None where there is no difference."""
    return None if math.isinf(psnr) else round(psnr, 2)


class ErrorFigure(BaseModel):
    """Measured error: PSNR at least ``psnr_db``, at most ``max_error`` seen, in 0..1."""

    psnr_db: float | None  # None: no difference
    max_error: float
    tiles_sampled: int
    tiles_total: int
    reference: str


class AccuracyReport(BaseModel):
    """Accuracy of the execution and of the precision.

    Execution is compared with the whole-image run at the same precision, precision with fp32.
    ``precision_note`` says what a model in bf16 or fp16 still computes in fp32, or why it cannot.
    """

    execution: Literal["exact", "bounded"]
    reason: str
    execution_error: ErrorFigure | None = None
    precision: str = "fp32"
    precision_error: ErrorFigure | None = None
    precision_note: str = ""


class MemoryReport(BaseModel):
    """Predicted and measured memory in bytes on the compute device.

    ``measurement_peak_bytes`` is the peak while errors were measured, which may use whatever the
    budget leaves; None if nothing had to be measured.
    """

    budget_bytes: int
    predicted_bytes: int
    upper_bytes: int
    peak_bytes: int
    high_water_bytes: int | None
    measurement_peak_bytes: int | None = None
    within_budget: bool
    source: str
    ledger: tuple[LedgerRow, ...]


class ProcessMemoryReport(BaseModel):
    """Resident memory of the whole process in bytes, as ``top`` shows it.

    ``peak_bytes`` is the kernel's mark over the job. ``library_bytes`` of it are outside budgets on
    the CPU: Python, and libraries with the files that they map, also those loaded meanwhile.
    """

    peak_bytes: int
    library_bytes: int | None

    def __str__(self) -> str:
        text = f"{format_bytes(self.peak_bytes)} resident at its peak"
        if self.library_bytes is None:
            return text
        return f"{text}, {format_bytes(self.library_bytes)} of that Python and its libraries"


class ItemReport(BaseModel):
    """Result of one item (a file, clip, volume or series): accuracy, memory and time.

    ``noun`` is what a kind of job calls one; its report next to the result has that key.
    ``smallest_bytes`` is the smallest budget for an item that no plan within the budget fits.
    """

    noun: ClassVar[str] = "item"

    input: str
    output: str
    status: Literal["done", "skipped", "failed", "planned"]
    plan: Plan | None = None
    accuracy: AccuracyReport | None = None
    memory: MemoryReport | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    notes: list[str] = []
    events: list[str] = []
    error: str | None = None
    hint: str | None = None
    smallest_bytes: int | None = None

    @classmethod
    def of_failure(cls, source: Path, target: Path, error: LowtideError) -> Self:
        """Return the report of an item that failed."""
        return cls(
            input=str(source),
            output=str(target),
            status="failed",
            error=error.message,
            hint=error.hint,
            smallest_bytes=error.smallest if isinstance(error, BudgetError) else None,
        )


class SkippedInput(BaseModel):
    """File or folder among the inputs that is of another kind, and the reason."""

    path: str
    reason: str

    @classmethod
    def of(cls, found: DiscoveredFiles) -> list[Self]:
        """Return what was found in addition to the inputs of a job's kind."""
        return [cls(path=str(one.path), reason=one.reason) for one in found.skipped]


class JobReport(BaseModel):
    """Report of a job of any kind; ``skipped_inputs`` lists inputs that are of another.

    ``model_choice`` says why a bundled model was taken where none was named. ``process`` is known
    when the job has ended, where the kernel tells.

    A kind of job adds its items under their own name, the ``noun``, and says here what they are
    and the error of one that cannot be read.
    """

    item_type: ClassVar[type[ItemReport]] = ItemReport
    noun: ClassVar[str] = "items"
    input_error: ClassVar[type[InputError]] = InputError

    schema_version: int = SCHEMA_VERSION
    lowtide: str = __version__
    model: dict[str, Any] = {}
    model_choice: str = ""
    device: str = "cpu"
    versions: dict[str, str] = {}
    skipped_inputs: list[SkippedInput] = []
    seconds: float = 0.0
    process: ProcessMemoryReport | None = None

    @property
    def items(self) -> list[Any]:
        """Reports of the items, in the order of the inputs."""
        return getattr(self, self.noun)

    @property
    def failures(self) -> list[Any]:
        """The items that failed."""
        return [item for item in self.items if item.status == "failed"]

    def raise_for_failures(self) -> None:
        """Raise an error if any item failed; the others are done.

        Raises:
            BudgetError: No item fits the budget; names the smallest budget that fits all.
            BatchError: Some items failed, or all for several reasons.
        """
        if not (failed := self.failures):
            return
        needed = [item.smallest_bytes for item in failed if item.smallest_bytes is not None]
        most = max(needed, default=0)
        hint = f"--budget {-(-most // MIB)}MiB" if needed else None
        if len(needed) == len(self.items):
            raise BudgetError(
                f"none of {len(failed)} {self.noun} fits the budget: the smallest that fits all is"
                f" {format_bytes(most)}",
                smallest=most,
                hint=hint,
            )
        raise BatchError(
            f"{len(failed)} of {len(self.items)} {self.noun} failed",
            failures={item.input: item.error or "" for item in failed},
            hint=hint and f"{hint}, in which all of the {len(needed)} that did not fit do",
        )


def versions_used(
    model: str = "", packages: Iterable[str] = (), runtime: str = "torch"
) -> dict[str, str]:
    """Return the versions of all that determines the values, of ``model`` and ``packages`` too."""
    import pyvips

    more = {"onnxruntime": version("onnxruntime")} if is_onnx(model) else {}
    return {
        "lowtide": __version__,
        "python": platform.python_version(),
        runtime: _runtime_version(runtime),
        "libvips": ".".join(str(pyvips.version(part)) for part in range(3)),
        "threads": str(thread_count()),
        **more,
        **{name: version(name) for name in packages},
    }


def _runtime_version(runtime: str) -> str:
    if runtime != "torch":
        return version(runtime)
    import torch

    return str(torch.__version__)  # with the name of its build


def sidecar_path(output: str | Path) -> Path:
    """Return the path of the report on one output, next to it."""
    return Path(f"{output}{REPORT_SUFFIX}")


def write_sidecar(report: JobReport, item: ItemReport, part: Path | None = None) -> Path:
    """Save one item's report next to its output and return the file's path.

    Args:
        part: Temporary name until the file is complete; random by default.

    Raises:
        OutputError: The file cannot be written.
    """
    path = sidecar_path(item.output)
    data = report.model_dump(
        mode="json", include=set(JobReport.model_fields) - {"skipped_inputs", "process"}
    )
    data[item.noun] = item.model_dump(mode="json")
    with atomic_output(path, part) as made:
        made.write_text(json.dumps(data, indent=2) + "\n")
    return path
