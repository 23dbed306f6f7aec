"""Memory of LDM4TS: training steps predicted and measured, what saves some, and sampling.

    python benchmarks/ldm4ts_memory.py [--part prediction|checkpointing|sampling|presets]
        [--only TEXT] [--pairs 5] [--fresh]

fp32 on the CPU, one variable, with as many threads as OMP_NUM_THREADS says.

prediction: what `lowtide train forecast` says of a step, and the peak of three steps of its trainer
    in a fresh process whose heap gives back, after steps of another network; then tensors alone.
checkpointing: what a step holds beyond weights, averages and the optimizer's state, by the
    allocator's events; and its processor seconds, in turns, with a heap that keeps.
sampling: peaks of drawing few and many samples of a window, less the samples themselves.
presets: for GPUs by their memory, the largest batches whose upper bound fits. Not measured.
"""

from __future__ import annotations

import os

import ldm4ts_runs as runs
import torch
from common import HEAP_KEEPS, ResultFile, row_parser
from subprocess_run import measure_in_subprocess
from training_memory import ENOUGH, WAYS, compare, error_percent

from lowtide import TrainingStep, estimate
from lowtide.jobs.train.memory import plan_step
from lowtide.jobs.train.user_models import load_user_model
from lowtide.memory.prediction.estimate import traced_estimate
from lowtide.memory.profiles import DeviceProfile, load_profile
from lowtide.memory.tracing.checkpointing import Checkpointing
from lowtide.training.tasks.forecast_config import ForecastConfig
from lowtide.training.traced_step import TaskModules, TracedTrainStep

# Image sides, batches and backends. Where flash-attn is not installed, as on CPUs, fused SDPA runs.
PREDICTED = [
    *((64, batch, "default") for batch in (1, 2, 4, 8, 16)),
    *((64, batch, "flash") for batch in (1, 4, 16)),
    *((224, batch, "default") for batch in (1, 4, 16)),
]
CHECKPOINTED = ((64, 16), (224, 4))
SAMPLES = [20, 500]
CARDS = ("laptop-6gb", "rtx3070-8gb", "rtx3060-12gb", "rtx5070ti-16gb")
SIZE = (224, 224)
# Batches by which the memory of a sample is found.
_FEW, _MANY = 16, 64


def predict(results: ResultFile, only: str, pairs: int) -> None:
    """One row for each size, batch, backend, and with checkpointing or without."""
    for side, batch, backend in PREDICTED:
        for how in ("none", "full"):
            row = f"prediction, {side} px, batch {batch}, {backend}, checkpointing {how}"
            if only not in row or results.has(row):
                continue
            config = runs.config_of(side, batch, backend, how)
            plan = plan_step(config, runs.task_of(config), ENOUGH, "cpu")
            tensors = predicted_tensors(config)
            found = measure_in_subprocess(
                "ldm4ts_runs:peak_of_steps", side, batch, backend, how
            ).result
            results.add(
                row,
                part="prediction",
                side=side,
                batch=batch,
                backend=backend,
                checkpointing=how,
                predicted_bytes=plan.predicted_bytes,
                upper_bytes=plan.upper_bytes,
                **found,
                error_percent=error_percent(plan.predicted_bytes, found["peak_bytes"]),
                within_bound=found["peak_bytes"] <= plan.upper_bytes,
                predicted_tensor_bytes=tensors,
                tensor_error_percent=error_percent(tensors, found["tensor_bytes"]),
            )


def predicted_tensors(config: ForecastConfig) -> int:
    """What of the expected peak is tensors and operators' workspace, which are traced."""
    task = runs.task_of(config)
    step = TracedTrainStep(
        task.data.example(config.datasets.train.batch_size_per_gpu), config, task.optims
    )
    found = traced_estimate(TaskModules(config, task), step, load_profile("cpu"))
    return sum(row.value for row in found.ledger if row.origin in ("traced", "probed"))


def checkpoint(results: ResultFile, only: str, pairs: int) -> None:
    """Every way of checkpointing against none."""
    for side, batch in CHECKPOINTED:
        row = f"checkpointing, {side} px, batch {batch}"
        if only not in row or results.has(row):
            continue
        found = measure_in_subprocess(
            "ldm4ts_runs:compare_checkpointing", side, batch, WAYS, pairs, env=HEAP_KEEPS
        ).result
        results.add(row, part="checkpointing", threads=torch.get_num_threads(), **compare(found))


def sample(results: ResultFile, only: str, pairs: int) -> None:
    """Few and many samples of one window."""
    for side in (64, 224):
        row = f"sampling, {side} px"
        if only not in row or results.has(row):
            continue
        found = measure_in_subprocess("ldm4ts_runs:sampling_bytes", side, SAMPLES).result
        few, many = (found[str(count)] for count in (SAMPLES[0], SAMPLES[-1]))
        results.add(row, part="sampling", peak_bytes=found, growth_percent=error_percent(many, few))


def plan_presets(results: ResultFile, only: str, pairs: int) -> None:
    """The largest power of two that fits each card, with checkpointing and without."""
    for name in CARDS:
        for how in ("none", "full"):
            row = f"presets, {name}, checkpointing {how}"
            if only not in row or results.has(row):
                continue
            card = load_profile(name)
            results.add(
                row,
                part="presets",
                card=card.title,
                budget_bytes=card.total_bytes - card.desktop_bytes,
                checkpointing=how,
                **largest_batch(card, how),
            )


def largest_batch(card: DeviceProfile, how: Checkpointing) -> dict[str, int]:
    """The largest batch that fits a card, the expected peak and its bound."""
    budget = card.total_bytes - card.desktop_bytes
    few, many = (upper(card, how, batch)[1] for batch in (_FEW, _MANY))
    a_sample = (many - few) / (_MANY - _FEW)
    batch = 1 << int((budget - few) / a_sample + _FEW).bit_length()
    while True:
        predicted, most = upper(card, how, batch)
        if most <= budget:
            return {"batch": batch, "predicted_bytes": predicted, "upper_bytes": most}
        batch //= 2


def upper(card: DeviceProfile, how: Checkpointing, batch: int) -> tuple[int, int]:
    """Expected peak of a step in fp32 with an EMA, and its bound."""
    model = load_user_model("ldm4ts").of_size(SIZE)
    inputs = model.example_inputs(batch, SIZE)  # pyright: ignore[reportCallIssue]
    step = TrainingStep(inputs, optimizer="adamw-foreach", checkpointing=how, ema=True)
    found = estimate(model, step, device=card)
    return found.predicted_bytes, found.upper_bytes


PARTS = {
    "prediction": predict,
    "checkpointing": checkpoint,
    "sampling": sample,
    "presets": plan_presets,
}


def main() -> None:
    """Measure what is missing."""
    parser = row_parser(__doc__, pairs=5)
    parser.add_argument("--part", choices=PARTS, help="only this part")
    options = parser.parse_args()
    # Plans are for the heap of the processes that are measured, which gives back.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    results = ResultFile(
        "ldm4ts_memory",
        fresh=options.fresh,
        packages=("accelerate",),
        about="Memory of LDM4TS: training steps predicted and measured, and samples.",
    )
    for part in [options.part] if options.part else PARTS:
        PARTS[part](results, options.only, options.pairs)


if __name__ == "__main__":
    main()
