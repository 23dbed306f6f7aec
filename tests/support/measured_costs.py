"""Costs of the bundled models as probes measured them, so that no test waits for one.

Probing takes seconds per model and precision; tests/streaming probes, and `test_first_run.py`.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import torch

import lowtide
from lowtide.core import heap
from lowtide.jobs.images.model_costs import store_costs
from lowtide.jobs.images.prepare import runtime_identity
from lowtide.memory.costs import ModelCosts
from lowtide.models.loaded_model import as_ensemble

SIDES = (64, 128, 256, 512)
# Reach, weights, peak bytes per input pixel, seconds at the four sides.
KNOWN = {
    ("lowtide-x2", "fp32"): (7, 206_016, 408, (0.003, 0.011, 0.05, 0.25)),
    ("lowtide-x2", "bf16"): (7, 103_008, 210, (0.001, 0.008, 0.04, 0.15)),
    ("lowtide-x4", "fp32"): (8, 601_728, 600, (0.013, 0.06, 0.17, 0.75)),
}


def costs_of(name: str, precision: str = "fp32") -> ModelCosts:
    reach, weights, per_pixel, seconds = KNOWN[name, precision]
    points = [
        dict(
            pixels=side * side,
            peak_bytes=side * side * per_pixel,
            resident_bytes=side * side * per_pixel * 5 // 4,
            seconds=time,
        )
        for side, time in zip(SIDES, seconds, strict=True)
    ]
    return ModelCosts.model_validate(
        dict(
            sha256=lowtide.load(name).descriptor.sha256,
            device="cpu",
            precision=precision,
            weight_bytes=weights,
            channels_last=True,
            batchable=True,
            receptive_field=reach,
            receptive_field_search_limit=31,
            points=points,
        )
    )


def remember_all() -> None:
    """Put them where jobs look: for this process, and for commands, which tune the heap."""
    before = heap._tuned
    for heap._tuned in (False, True):
        for name, precision in KNOWN:
            costs = costs_of(name, precision)
            store_costs(costs, costs.sha256)
    heap._tuned = before


def remember_also(path: Path, *precisions: str) -> None:
    """Costs of lowtide-x2 for another file, or each test would measure it."""
    sha256 = lowtide.load(path).descriptor.sha256
    for precision in precisions:
        known = costs_of("lowtide-x2", "fp32" if precision == "fp32" else "bf16")
        costs = known.model_copy(update={"sha256": sha256, "precision": precision})
        store_costs(costs, sha256)


def remember_onnx(path: Path, reach: int = 7) -> None:
    """The same for an ONNX file, alone and asked eight times."""
    facts = lowtide.load(path).descriptor
    for model in (facts, as_ensemble(facts)):
        costs = costs_of("lowtide-x2").model_copy(
            update={"sha256": model.sha256, "receptive_field": reach, "channels_last": False}
        )
        store_costs(costs, runtime_identity(model))


def quick_jobs() -> Iterator[None]:
    """A fixture's body: costs are known, and one thread runs what is too small to be shared.

    Threads that wait for each other would take most of the time of these tests, and what is
    left of it the collector, which every job calls: it need not look at all of PyTorch.
    """
    remember_all()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    remember_all()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)
