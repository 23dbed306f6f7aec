"""The runs on which predictions of memory are judged.

`rows` is the whole grid: every model of ``zoo_models`` at several sizes and batches, in fp32 and
a low precision, for inference and for training with and without gradient checkpointing. All is
made from fixed seeds; weights are random except those of trained models, because memory does
not depend on their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from zoo_models import ENTRIES, Entry

from lowtide.core.units import GIB, MIB
from lowtide.memory.tracing.checkpointing import Checkpointing
from lowtide.memory.tracing.steps import InferenceStep, Step, TrainingStep

Mode = Literal["inference", "training"]
Precision = Literal["fp32", "bf16", "autocast"]

# Smaller rows would measure the process more than the model; larger ones take too long.
LEAST, MOST = 120 * MIB, int(1.8 * GIB)


@dataclass(frozen=True)
class Row:
    """One run of the grid."""

    entry: str
    size: int
    batch: int
    precision: Precision
    mode: Mode
    checkpointing: Checkpointing = "none"

    @property
    def name(self) -> str:
        """Unique in the grid."""
        mode = self.mode if self.checkpointing == "none" else f"training, {self.checkpointing}"
        return f"{self.entry} {self.size} px x {self.batch}, {self.precision}, {mode}"

    @property
    def family(self) -> str:
        """The kind of network, which calibration must not have seen."""
        return ENTRIES[self.entry].family

    @property
    def estimated_bytes(self) -> int:
        """Roughly what it takes, for choosing rows and ordering them."""
        costs = ENTRIES[self.entry].costs
        training = self.mode == "training"
        per_pixel = getattr(costs, self.checkpointing) if training else costs.inference
        weights = costs.weights * (4 if training else 1)
        weights_share, share = {
            "fp32": (1.0, 1.0),
            "bf16": (0.5, 0.5),
            "autocast": (1.0, costs.autocast),
        }[self.precision]
        return int(weights * weights_share + per_pixel * self.pixels * share)

    @property
    def pixels(self) -> int:
        """Input pixels of the whole batch."""
        return self.size**2 * self.batch

    def model(self) -> nn.Module:
        """The model with its weights, the same each time."""
        if self.entry not in ENTRIES:
            raise SystemExit(f"{self.entry}: set LOWTIDE_DATA to the folder of its trained weights")
        torch.manual_seed(0)
        model = ENTRIES[self.entry].build().requires_grad_(True)
        return model.to(torch.bfloat16) if self.precision == "bf16" else model

    def step(self) -> Step:
        """The run with its inputs, the same each time."""
        torch.manual_seed(1)
        given = ENTRIES[self.entry].inputs(self.size, self.batch)
        if self.precision == "bf16":
            given = tuple(t.to(torch.bfloat16) if t.is_floating_point() else t for t in given)
        autocast = torch.bfloat16 if self.precision == "autocast" else None
        if self.mode == "inference":
            return InferenceStep(given, autocast=autocast)
        return TrainingStep(given, checkpointing=self.checkpointing, autocast=autocast)


def rows() -> list[Row]:
    """The whole grid, without rows that are too small to be informative, or too large."""
    return [
        row
        for entry in ENTRIES.values()
        for row in _all_rows(entry)
        if LEAST <= row.estimated_bytes <= MOST
    ]


def checked_rows() -> set[str]:
    """Names of those whose tensors are also followed through a real run: the smallest of each
    model, precision, mode and checkpointing."""
    smallest: dict[tuple[str, ...], Row] = {}
    for row in rows():
        kind = (row.entry, row.precision, row.mode, row.checkpointing)
        if kind not in smallest or row.pixels < smallest[kind].pixels:
            smallest[kind] = row
    return {row.name for row in smallest.values()}


def _all_rows(entry: Entry) -> Iterator[Row]:
    for size in entry.sizes:
        for batch in entry.batches:
            for precision in ("fp32", "bf16" if entry.casts_bf16 else "autocast"):
                yield Row(entry.name, size, batch, precision, "inference")
    for size_index, size in enumerate(entry.training_sizes):
        for batch_index, batch in enumerate(entry.batches):
            # Both ways to train in low precision, in turn.
            low = "bf16" if entry.casts_bf16 and batch_index % 2 == 0 else "autocast"
            for precision in ("fp32", low):
                third = (size_index + batch_index + (precision == "fp32")) % 3 == 0
                for how in entry.checkpointing:
                    if how != "selective" or third:
                        yield Row(entry.name, size, batch, precision, "training", how)
