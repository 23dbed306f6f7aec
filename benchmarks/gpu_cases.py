"""One model and one input on a GPU: its runs, and their time and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import in_turns
from streaming_models import given, made
from torch import Tensor

from lowtide.memory.oom import is_out_of_memory
from lowtide.streaming.api import Streamed
from lowtide.streaming.certificate import allow_tf32
from lowtide.streaming.engine.placement import PagePlacement

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
# In fp64 larger ones would not fit.
EXACT_TO = 2048


class Planned(NamedTuple):
    """A run by bands with its title and predicted bytes.

    The prediction does not include weights and image.
    """

    run: Callable[[], Tensor]
    title: str
    predicted_bytes: int


class Case:
    """One model and one input on the GPU."""

    def __init__(
        self, name: str, side: int, precision: str, pages: PagePlacement, kept: Path | None = None
    ) -> None:
        self.name, self.side, self.precision = name, side, precision
        self.pages: PagePlacement = pages
        self.dtype, self._kept = PRECISIONS[precision], kept
        self.model = made(name).to("cuda", self.dtype)
        self.image = given(name, side, side).to("cuda", self.dtype)

    def whole(self) -> Tensor:
        """The model's own result."""
        with torch.inference_mode(), allow_tf32(self.precision == "tf32"):
            return self.model(self.image)

    def streamed(self, budget: int) -> Planned:
        """A run by bands within a budget, planned already."""
        module = Streamed(self.model, budget=budget, pages=self.pages)
        with allow_tf32(self.precision == "tf32"):
            prepared = module.prepare(self.image)

        def run() -> Tensor:
            with torch.inference_mode(), allow_tf32(self.precision == "tf32"):
                return module(self.image)

        return Planned(run, prepared.title, prepared.layout.peak_bytes)

    def exact(self) -> Tensor | None:
        """The result in fp64, or None where that would not fit, or another case has it.

        Of values that fp32 can represent, which all precisions get. In fp64 a GPU takes up to a
        minute: the first case keeps the result for the others.
        """
        if self.pages != "auto" or self.side > EXACT_TO:
            return None
        file = None if self._kept is None else self._kept / f"{self.name} {self.side}.pt"
        if file is not None and file.exists():
            return torch.load(file, map_location="cuda")
        model = made(self.name).to("cuda", torch.float64)
        image = given(self.name, self.side, self.side).to("cuda", torch.float64)
        with torch.inference_mode():
            found = fitting(lambda: model(image))
        if file is not None:
            torch.save(found, file)
        return found


def fitting(run: Callable[[], Tensor]) -> Tensor | None:
    """What ``run`` returns, or None if memory runs out."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return None


def with_peak(run: Callable[[], Tensor]) -> tuple[Tensor | None, int, int]:
    """What `fitting` returns, the peak of allocated bytes, and newly reserved bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    result = fitting(run)
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved() - before


def seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Clock time of each, in turns, each round the other way round."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _, name in in_turns(runs, rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[name]()
        end.record()
        end.synchronize()
        taken[name].append(start.elapsed_time(end) / 1000)
    return taken


def largest(result: Tensor, other: Tensor | None) -> float | None:
    """The largest difference."""
    if other is None:
        return None
    one, other = (tensor.to("cuda", torch.float64) for tensor in (result, other))
    return (one - other).abs().max().item()
