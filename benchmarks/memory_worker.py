"""What ``memory_server.py`` runs: the memory of a row of the zoo, measured or predicted.

``measure`` and ``live`` want a fresh process each, with MALLOC_MMAP_THRESHOLD_=65536 in its
environment: by default the C library raises that threshold as a program runs, keeps what is freed,
and makes resident memory depend on what ran before.

``measure``: what the run adds to the process's anonymous resident memory, model and inputs
included, libraries and what they set up on first use not. Two figures, both of which can only
be too low: the sampled peak of anonymous pages misses what is live for less than a millisecond; the
kernel's high-water mark misses nothing, but counts file pages (library code) too, so that their
largest growth must be taken off, although they may have grown later than at the peak. The
measured peak is the larger of the two. ``kept_bytes`` is what libraries keep when the run is over
(oneDNN's compiled kernels, one or more for each size of matrix or image).

``live``: the run followed tensor by tensor, to be compared with the prediction to the byte;
``c10_peak_bytes`` is what PyTorch's allocator had given out at most in one more run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Row

from lowtide.core.heap import trim_heap
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.prediction.estimate import estimate
from lowtide.memory.tracing.checkpointing import CHECKPOINTING
from lowtide.memory.tracing.fake import model_tensors
from lowtide.memory.tracing.steps import NullStepObserver, TrainingStep, input_tensors
from lowtide.memory.tracing.trace import MemoryTracer

THREADS = 2
_SAMPLE_SECONDS = 0.001
_PAGE = 4096


class Pages:
    """Anonymous and file pages of this process above those at the start, sampled."""

    def __init__(self) -> None:
        self._anonymous, self._file = _pages()
        self.peak_bytes = self.file_growth_bytes = 0
        self._end = threading.Event()

    def now(self) -> int:
        """Anonymous bytes above the start; what is seen here counts for the peak."""
        anonymous, file = _pages()
        self.peak_bytes = max(self.peak_bytes, anonymous - self._anonymous)
        self.file_growth_bytes = max(self.file_growth_bytes, file - self._file)
        return anonymous - self._anonymous

    @property
    def measured_bytes(self) -> int:
        """The better of the two lower bounds of the peak."""
        return max(self.peak_bytes, self.high_water_bytes - self.file_growth_bytes)

    def __enter__(self) -> Pages:
        """Begin, forgetting the peak of what was before."""
        self.peak_bytes = self.file_growth_bytes = 0
        Path("/proc/self/clear_refs").write_text("5")
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._end.wait(_SAMPLE_SECONDS):
            self.now()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.now()
        self.high_water_bytes = _high_water() - self._anonymous - self._file


def _pages() -> tuple[int, int]:
    """Anonymous and file bytes, of the same moment."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE, int(shared) * _PAGE


def _high_water() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


class Holding(NullStepObserver):
    """Remembers the optimizer's tensors of a step."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def label(self, tensors: Iterable[Tensor], kind: Any) -> None:
        """Keep what is there between steps."""
        if kind == "optimizer":
            self.tensors = list(tensors)


def warm_up(dtype: torch.dtype) -> None:
    """Touch the library code, threads and tables that any model needs, on tiny tensors."""
    for kind in {torch.float32, dtype}:
        for how in CHECKPOINTING:
            block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
            chain = nn.Sequential(block, nn.Sequential(nn.Conv2d(8, 8, 1), nn.GELU())).to(kind)
            step = TrainingStep((torch.rand(1, 8, 32, 32, dtype=kind),), checkpointing=how)
            step.prepare(nn.Sequential(chain))(NullStepObserver())
        linear = nn.Linear(32, 32).to(kind)
        value = F.layer_norm(linear(torch.rand(1, 8, 32, 32, dtype=kind)), (32,))
        value = F.scaled_dot_product_attention(value, value, value)
        value = torch.softmax(value @ value.transpose(-1, -2), -1)
        F.interpolate(value, scale_factor=2, mode="bilinear").sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != kind):
            linear(torch.rand(1, 32, dtype=kind)).sum().backward()


def measure(row: Row) -> dict[str, Any]:
    """The measured peak of one row, in this process, which must be fresh."""
    warm_up(torch.float32 if row.precision == "fp32" else torch.bfloat16)
    row.model()  # imports what building it needs
    trim_heap(collect=True)
    pages = Pages()
    model, step = row.model(), row.step()
    run = step.prepare(model)
    trim_heap(collect=True)  # neither building nor preparing counts
    held = pages.now()
    started = time.process_time()
    with pages:
        for _ in range(2 if step.training else 1):
            run(NullStepObserver())
    seconds = time.process_time() - started
    trim_heap(collect=True)
    kept = pages.now() - held
    return {
        "measured_bytes": pages.measured_bytes,
        "peak_bytes": pages.peak_bytes,
        "high_water_bytes": pages.high_water_bytes,
        "file_growth_bytes": pages.file_growth_bytes,
        "held_bytes": held,
        "kept_bytes": kept,
        "cpu_seconds": round(seconds, 2),
    }


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def live(row: Row) -> dict[str, Any]:
    """Most bytes that the tensors of a real run hold at once."""
    model, step = row.model(), row.step()
    run, holding = step.prepare(model), Holding()
    inside = live_peak_bytes(lambda: run(holding))
    known = _bytes_of([*model_tensors(model), *input_tensors(step), *holding.tensors])
    tracer = MemoryTracer()
    tracer.label(model_tensors(model), "weights")
    tracer.label(input_tensors(step), "inputs")
    with tracer:
        run(tracer)
    return {"live_measured_bytes": tracer.trace.peak_bytes, "c10_peak_bytes": inside + known}


def predict(row: Row) -> dict[str, Any]:
    """What the package says of the row."""
    said = estimate(row.model(), row.step())
    return {
        "predicted_bytes": said.predicted_bytes,
        "upper_bytes": said.upper_bytes,
        "live_bytes": said.live_bytes,
        "method": said.method,
        "phase": said.phase,
        "operator": said.operator,
        "predict_seconds": round(said.seconds, 2),
        "ledger": {line.name: line.value for line in said.ledger},
        "notes": list(said.notes),
        "objects": said.objects.model_dump() if said.objects else None,
    }


KINDS: dict[str, Callable[[Row], dict[str, Any]]] = {
    "measure": measure,
    "live": live,
    "predict": predict,
}
