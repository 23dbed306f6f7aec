"""How far predictions have been from measurements, and what upper bound follows from that."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lowtide._version import __version__
from lowtide.core.atomic_file import append, open_own
from lowtide.core.heap import HeapSetting, heap_is_tuned, heap_mode
from lowtide.core.units import MIB
from lowtide.memory.cache import cache_folder
from lowtide.memory.prediction.runtime_objects import RuntimeCosts

# Fixed parts that are tried: what a process takes besides its tensors differs by so much.
_FIXED = (0, 2 * MIB, 4 * MIB, 8 * MIB, 12 * MIB, 16 * MIB, 24 * MIB, 32 * MIB)
_COVERAGE = 0.99
# A model of a family that no run was of is off further than runs tell. On the grid of the
# benchmarks, judged with each family left out, twice the width held in 99 % of the rows.
_UNSEEN = 2.0
# Bytes of a run at which two bounds are compared, and those of them that the heap keeps.
_TYPICAL = 256 * MIB, 96 * MIB
# Fewer runs than this say nothing of a hundredth.
_ENOUGH = 40


# In tiles or whole, and in bands: they differ in what is exact about their predictions.
RunKind = Literal["tiled", "streamed"]


class Residual(BaseModel):
    """One run: bytes predicted for it, and bytes measured."""

    model_config = ConfigDict(frozen=True)

    predicted: int
    measured: int


class Calibration(BaseModel):
    """An upper bound for predictions: a share of them and a fixed part, from ``count`` runs.

    ``families`` says that these were of many kinds of models, so that it stands by itself. Where
    ``kept_share`` is known, it is the share of what the C heap is predicted to keep, and ``share``
    that of the rest.
    """

    model_config = ConfigDict(frozen=True)

    share: float
    fixed_bytes: int
    count: int
    coverage: float
    families: bool = False
    kept_share: float | None = None

    def upper(self, predicted: int, kept: int = 0) -> int:
        """Bytes that a run predicted to take ``predicted`` should not exceed, ``kept`` of them what
        the C heap keeps."""
        apart = 0 if self.kept_share is None else kept
        rest = math.ceil((predicted - apart) * (1 + self.share)) + self.fixed_bytes
        return rest + math.ceil(apart * (1 + (self.kept_share or 0)))


# For predictions that are told as they are.
NO_MARGIN = Calibration(share=0.0, fixed_bytes=0, count=0, coverage=1.0)


def calibrate(
    residuals: Sequence[Residual], coverage: float = _COVERAGE, parts: Sequence[int] = _FIXED
) -> Calibration:
    """Twice the width of the tightest bound, of the form share + fixed part, that would have
    held in ``coverage`` of the runs: models of other kinds will come. ``parts`` are the fixed
    ones that are tried.

    The quantile is that of split conformal prediction (Vovk et al.; Lei et al.,
    arXiv:1604.04173): of n residuals the ⌈(n + 1)·coverage⌉-th smallest, the largest if there
    are too few. Among the fixed parts tried, the one with the lowest bounds on average wins.
    """
    if not residuals:
        raise ValueError("no residuals to calibrate with")
    rank = min(math.ceil((len(residuals) + 1) * coverage), len(residuals)) - 1
    best: tuple[float, Calibration] | None = None
    for fixed in parts:
        shares = sorted((r.measured - fixed) / r.predicted - 1 for r in residuals)
        bound = Calibration(
            share=round(max(shares[rank], 0.0) + 5e-4, 3),
            fixed_bytes=fixed,
            count=len(residuals),
            coverage=coverage,
        )
        width = sum(bound.upper(r.predicted) / r.predicted for r in residuals) / len(residuals)
        if best is None or width < best[0]:
            best = width, bound
    assert best is not None
    share, fixed = best[1].share * _UNSEEN, int(best[1].fixed_bytes * _UNSEEN)
    return best[1].model_copy(update={"share": round(share, 4), "fixed_bytes": fixed})


def shipped_calibration(kind: str) -> Calibration:
    """The calibration that comes with the package for ``"cpu"`` or ``"cuda"``.

    Made from the committed benchmark by a committed script; for CUDA, which has not been
    measured, a prior.
    """
    return Calibration.model_validate(_shipped()[kind])


class RunBounds(BaseModel):
    """What past runs of one kind say of the upper bounds of further ones, where they are known.

    ``usual`` is of runs in this process's heap as it is set; ``thrifty`` of those in one that gives
    freed blocks back, where ``can_give_back`` says that this process can be run so too.
    """

    model_config = ConfigDict(frozen=True)

    usual: Calibration | None = None
    thrifty: Calibration | None = None
    can_give_back: bool = False


def bounds_of_runs(kind: RunKind, device: str) -> RunBounds:
    """The bounds of runs of one kind on one device.

    Those that the package ships are of the C heap's two settled ways (`heap_mode`). This
    machine's own take their place only where they ask for more, since they may be of gentler
    models.
    """
    own = ResidualStore(device, kind).calibration()
    if device != "cpu":
        return RunBounds(usual=own)
    heap = heap_mode()
    shipped = None if heap is None else _shipped_run(kind, heap)
    wider = own is not None and (shipped is None or own.upper(*_TYPICAL) > shipped.upper(*_TYPICAL))
    return RunBounds(
        usual=own if wider else shipped,
        thrifty=_shipped_run(kind, "gives back"),
        can_give_back=heap_is_tuned(),
    )


def _shipped_run(kind: RunKind, heap: HeapSetting) -> Calibration | None:
    known = _shipped().get(kind, {}).get(heap)
    return None if known is None else Calibration.model_validate(known)


def shipped_runtime() -> RuntimeCosts:
    """What kernels and objects take on the CPU, from the same benchmark."""
    return RuntimeCosts.model_validate(_shipped()["runtime"])


@functools.cache
def _shipped() -> dict[str, Any]:
    folder = importlib.resources.files("lowtide.memory") / "data"
    return json.loads((folder / "calibration.json").read_text())


class ResidualStore:
    """Runs of one kind on one device of this machine, one JSON line each, newest last.

    Runs of other versions or another setting of the C heap are kept apart, since they take
    other memory.
    """

    def __init__(
        self, device: str, kind: RunKind, folder: Path | None = None, keep: int = 400
    ) -> None:
        import torch

        parts = (
            device,
            kind,
            torch.__version__,
            __version__,
            heap_is_tuned(),
            torch.get_num_threads(),
        )
        name = hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]
        self._path = (folder or cache_folder()) / f"residuals-{name}.jsonl"
        self._keep = keep

    def add(self, residual: Residual) -> None:
        """Append one run; a folder that cannot be written only means bounds as shipped."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_own(self._path)
            try:
                append(descriptor, residual.model_dump_json() + "\n")
            finally:
                os.close(descriptor)

    def read(self) -> list[Residual]:
        """The newest runs, oldest first; damaged lines are left out."""
        if not self._path.is_file():
            return []
        found = []
        text = self._path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines()[-self._keep :]:
            with contextlib.suppress(ValueError):
                found.append(Residual.model_validate_json(line))
        return found

    def calibration(self) -> Calibration | None:
        """What these runs say of upper bounds, once there are enough of them."""
        residuals = self.read()
        return calibrate(residuals) if len(residuals) >= _ENOUGH else None
