"""What the C heap keeps: a row of estimates, named, and enough for a plain process."""

import sys

import pytest
import torch
from subprocess_run import measure_in_subprocess
from torch import nn

import lowtide
from lowtide.core.heap import current_heap_mode
from lowtide.jobs.train.plan import plan_training
from lowtide.memory.prediction.result import HeapUse, heap_row, heap_use
from lowtide.memory.tracing.steps import InferenceStep, TrainingStep
from lowtide.memory.tracing.trace import MemoryTrace, StorageEvent
from support.stored_tables import empty_table

MIB = 1 << 20
# glibc's heap as it comes, in a process that is measured.
AS_IT_COMES: dict[str, str | None] = {"MALLOC_MMAP_THRESHOLD_": None}
on_glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures glibc's heap")


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(6):
        layers += [nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*layers), torch.rand(4, 3, 128, 128)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(128, 128, num_layers=2)

    def forward(self, series):
        return self.layers(series)[0]


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    return Recurrent(), torch.rand(300, 24, 128)


def train(name: str, steps: int) -> None:
    """Run some steps as any script does."""
    model, inputs = globals()[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_bytes(name: str, env: dict[str, str | None], steps: int = 6) -> int:
    """Measure `train` in a process of its own, which has imported what the first step imports."""
    env = {"OMP_NUM_THREADS": "1", **env}
    return measure_in_subprocess(
        f"{__name__}:train", name, steps, env=env, imports=("torch._dynamo",)
    ).peak_bytes


def estimated(
    make, heap=None, step: type[InferenceStep | TrainingStep] = TrainingStep
) -> lowtide.Estimate:
    model, inputs = make()
    return lowtide.estimate(model, step((inputs,)), operators=empty_table(), heap=heap)


@pytest.mark.slow
@on_glibc
def test_a_plain_process_stays_within_the_bound() -> None:
    found = estimated(convolutions, "default")
    peak = peak_bytes("convolutions", AS_IT_COMES)
    assert peak <= found.upper_bytes
    assert peak == pytest.approx(found.predicted_bytes, rel=0.25)  # no two runs take the same
    assert peak > found.trimming_heap_bytes[1]  # without the row it would not


@on_glibc
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_recurrent_layers_workspace_counts_whether_written_or_not() -> None:
    found = estimated(recurrent, "trim")
    peak = peak_bytes("recurrent", {"THP_MEM_ALLOC_ENABLE": None}, steps=2)
    assert peak <= found.predicted_bytes <= 2 * peak


@pytest.mark.own_process
def test_the_estimate_names_its_heap_and_gives_both_figures() -> None:
    found = estimated(convolutions)
    assert found.heap == current_heap_mode() == "default"
    assert "glibc's heap as it comes" in str(found)
    trims = estimated(convolutions, "trim")
    assert found.trimming_heap_bytes == (trims.predicted_bytes, trims.upper_bytes)
    assert trims.upper_bytes < found.predicted_bytes < found.upper_bytes
    assert any("MALLOC_MMAP_THRESHOLD_" in note for note in found.notes)
    assert not any("MALLOC_MMAP_THRESHOLD_" in note for note in trims.notes)
    called = estimated(convolutions, step=InferenceStep)
    assert called.predicted_bytes > called.trimming_heap_bytes[0]


def test_a_gpu_has_no_c_heap() -> None:
    model, inputs = convolutions()
    found = lowtide.estimate(model, TrainingStep((inputs,)), device="rtx3060-12gb", heap="cache")
    assert found.heap is None
    assert "heap" not in {row.name for row in found.ledger}


@pytest.mark.own_process
def test_a_plan_is_for_a_process_that_sets_nothing(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert current_heap_mode() == "trim"
    plan = plan_training(convolutions()[0], device="cpu", budget="4GiB", batch=2, size=(64, 64))
    assert plan.fit_report.requested.heap == "default"
    assert "heap" in {row.name for row in plan.fit_report.requested.ledger}


def test_only_blocks_that_the_heap_keeps_count() -> None:
    trace = MemoryTrace(
        initial={0: 8 * MIB, 1: MIB, 2: 40 * MIB},
        kinds={0: "weights", 1: "optimizer", 2: "optimizer"},
        events=[
            *(StorageEvent(0, 3, 20 * MIB), StorageEvent(1, 4, 33 * MIB)),
            *(StorageEvent(2, 3, -20 * MIB), StorageEvent(3, 5, 2 * MIB)),
            *(StorageEvent(4, 0, -8 * MIB), StorageEvent(5, 5, -2 * MIB)),
        ],
    )
    assert heap_use(trace, 1, "default") == HeapUse(21 * MIB, 21 * MIB, 20 * MIB)
    assert heap_use(trace, 3, "default") == HeapUse(21 * MIB, 3 * MIB, 20 * MIB)
    assert heap_use(trace, 3, "cache") == HeapUse(3 * MIB, 3 * MIB, 2 * MIB)
    assert heap_use(trace, 3, "trim") == HeapUse(0, 0, 0)


def test_a_heap_that_grew_before_the_peak_is_part_of_it() -> None:
    early = heap_row(HeapUse(100 * MIB, 10 * MIB, MIB), "default", training=True)
    late = heap_row(HeapUse(100 * MIB, 100 * MIB, MIB), "default", training=True)
    assert early is not None
    assert late is not None
    assert early.value - late.value == 90 * MIB
    assert heap_row(HeapUse(100, 100, 8), "trim", training=True) is None
