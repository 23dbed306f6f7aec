"""Upper bounds for peak-memory predictions, calibrated on measured runs.

A split-conformal quantile of the residuals (measured against predicted bytes) gives the bound.
Calibrations ship with the package; each machine adds residuals of its own runs.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lowtide.core.heap import HeapMode, heap_is_tuned, heap_mode
from lowtide.core.units import MIB
from lowtide.memory.plan_store import JsonCache, machine_facts

# Candidates for the fixed part: the spread of what a process takes in addition to its tensors.
_FIXED_CANDIDATES = (0, 2 * MIB, 4 * MIB, 8 * MIB, 12 * MIB, 16 * MIB, 24 * MIB, 32 * MIB)
_COVERAGE = 0.99
# Safety factor: predictions are further off for model families that no run covers. On the grid of
# the benchmarks, with each family left out in turn, twice the width held in 99 % of the rows.
_SAFETY_FACTOR = 2.0
# Where two bounds are compared: predicted bytes of a run, and those of them that the heap keeps.
_TYPICAL_RUN = 256 * MIB, 96 * MIB
# Fewer runs than this cannot support a 99 % quantile.
_MIN_RUNS = 40


# "tiled" covers whole images too. The kinds differ in which parts of a prediction are exact.
RunKind = Literal["tiled", "streamed"]


class PredictionResidual(BaseModel):
    """Predicted and measured peak of one run, in bytes."""

    model_config = ConfigDict(frozen=True)

    predicted: int
    measured: int


class BoundCalibration(BaseModel):
    """Upper bound of a prediction: a relative margin plus a fixed number of bytes.

    ``share`` is the relative margin and ``fixed_bytes`` the fixed part, fitted to ``count`` runs so
    that the bound held in a fraction ``coverage`` of them. ``families`` is true where the runs
    cover many model families, so that the bound needs no runs of this machine. Where ``kept_share``
    is known, it is the margin on the bytes that the C heap is predicted to keep, and ``share``
    applies to the rest.
    """

    model_config = ConfigDict(frozen=True)

    share: float
    fixed_bytes: int
    count: int
    coverage: float
    families: bool = False
    kept_share: float | None = None

    def upper(self, predicted: int, heap_kept: int = 0) -> int:
        """Return the upper bound in bytes of a run predicted to take ``predicted`` bytes.

        ``heap_kept`` are those of the predicted bytes that the C heap keeps.
        """
        separate = 0 if self.kept_share is None else heap_kept
        rest = math.ceil((predicted - separate) * (1 + self.share)) + self.fixed_bytes
        return rest + math.ceil(separate * (1 + (self.kept_share or 0)))


# For predictions that are reported without a margin.
NO_MARGIN = BoundCalibration(share=0.0, fixed_bytes=0, count=0, coverage=1.0)


def calibrate_bound(
    residuals: Sequence[PredictionResidual],
    coverage: float = _COVERAGE,
    parts: Sequence[int] = _FIXED_CANDIDATES,
) -> BoundCalibration:
    """Fit an upper bound that holds in ``coverage`` of the runs, and double its width.

    The bound has the form share + fixed part. It is twice as wide as the tightest one that would
    have held in these runs, because later models may be of families that no run covers.

    The quantile is that of split conformal prediction (Vovk et al.; Lei et al.,
    arXiv:1604.04173): of n residuals the ⌈(n + 1)·coverage⌉-th smallest, the largest if there
    are too few. Among the fixed parts tried, the one with the lowest bounds on average wins.

    Args:
        residuals: Predicted and measured peaks, one for each run.
        coverage: Fraction of the runs in which the bound must hold.
        parts: Candidates for the fixed part, in bytes.

    Raises:
        ValueError: ``residuals`` is empty.
    """
    if not residuals:
        raise ValueError("no residuals to calibrate with")
    rank = min(math.ceil((len(residuals) + 1) * coverage), len(residuals)) - 1
    best: tuple[float, BoundCalibration] | None = None
    for fixed in parts:
        shares = sorted([(r.measured - fixed) / r.predicted - 1 for r in residuals])
        bound = BoundCalibration(
            share=round(max(shares[rank], 0.0) + 5e-4, 3),
            fixed_bytes=fixed,
            count=len(residuals),
            coverage=coverage,
        )
        # As `upper` would, without a call for each of hundreds of runs.
        times = 1 + bound.share
        uppers = [(math.ceil(r.predicted * times) + fixed) / r.predicted for r in residuals]
        width = sum(uppers) / len(residuals)
        if best is None or width < best[0]:
            best = width, bound
    assert best is not None
    share, fixed = best[1].share * _SAFETY_FACTOR, int(best[1].fixed_bytes * _SAFETY_FACTOR)
    return best[1].model_copy(update={"share": round(share, 4), "fixed_bytes": fixed})


def shipped_calibration(kind: str) -> BoundCalibration:
    """Load the packaged calibration for ``"cpu"`` or ``"cuda"``.

    A committed script makes it from the committed benchmark. CUDA has not been measured; its
    calibration is a prior.
    """
    return BoundCalibration.model_validate(shipped_data()[kind])


class RunBounds(BaseModel):
    """Upper bounds of one kind of run, by C heap setting, where they are known.

    ``current_heap`` comes from runs in a heap that is set as this process's is. ``trimming_heap``
    comes from runs in a heap that returns freed blocks to the system; ``can_trim`` says that this
    process can run with such a heap.
    """

    model_config = ConfigDict(frozen=True)

    current_heap: BoundCalibration | None = None
    trimming_heap: BoundCalibration | None = None
    can_trim: bool = False


def run_bounds(kind: RunKind, device: str) -> RunBounds:
    """Return the upper bounds of one kind of run on one device.

    The packaged bounds cover the C heaps that `heap_mode` names. The bound from this machine's own
    runs replaces them only where it is larger, since those runs may be of less demanding models.
    """
    own = PredictionResidualStore(device, kind).calibration()
    if device != "cpu":
        return RunBounds(current_heap=own)
    heap = heap_mode()
    shipped = None if heap is None else _shipped_run(kind, heap)
    wider = own is not None and (
        shipped is None or own.upper(*_TYPICAL_RUN) > shipped.upper(*_TYPICAL_RUN)
    )
    return RunBounds(
        current_heap=own if wider else shipped,
        trimming_heap=_shipped_run(kind, "trim"),
        can_trim=heap_is_tuned(),
    )


def _shipped_run(kind: RunKind, heap: HeapMode) -> BoundCalibration | None:
    known = shipped_data().get(kind, {}).get(heap)
    return None if known is None else BoundCalibration.model_validate(known)


@functools.cache
def shipped_data() -> dict[str, Any]:
    """Load all that a committed script has fitted to measured runs."""
    folder = importlib.resources.files("lowtide.memory") / "data"
    return json.loads((folder / "calibration.json").read_text())


class PredictionResidualStore:
    """Residuals of the newest runs of one kind on one device, in the plan store.

    Runs in differently set C heaps are kept apart, because these take other memory.

    Args:
        device: Device of the runs, for instance ``"cpu"``.
        kind: Kind of the runs.
        folder: Cache folder; the package's by default.
        keep: How many runs are kept.
    """

    def __init__(
        self, device: str, kind: RunKind, folder: Path | None = None, keep: int = 400
    ) -> None:
        self._store, self._keep = JsonCache(folder), keep
        self._facts = kind, heap_is_tuned(), *machine_facts(device)

    def add(self, residual: PredictionResidual) -> None:
        """Store one run.

        If the folder cannot be written, the run is dropped and the packaged bounds stay in use.
        """
        runs = [*self.read(), residual][-self._keep :]
        pairs = [(run.predicted, run.measured) for run in runs]
        self._store.put("runs", *self._facts, value=pairs)

    def read(self) -> list[PredictionResidual]:
        """Return the newest runs, oldest first."""
        pairs = self._store.get("runs", *self._facts) or ()
        return [
            PredictionResidual(predicted=predicted, measured=measured)
            for predicted, measured in pairs
        ]

    def calibration(self) -> BoundCalibration | None:
        """Calibrate on these runs; None while there are fewer than 40."""
        residuals = self.read()
        return calibrate_bound(residuals) if len(residuals) >= _MIN_RUNS else None
