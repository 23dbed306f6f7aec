"""Write the costs of the bundled models that hold on any machine, which ship with the package.

    python scripts/bundled_costs.py

A test compares them with what measuring finds. The kernels of one PyTorch take other workspace than
those of the next: run it with the oldest and the newest, and the larger is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.images.build_network import build_network, network_weight_bytes
from lowtide.jobs.images.prepare import load_model
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.models import bundled_names, describe_bundled
from lowtide.streaming.probe.measure_costs import probe_costs

TARGET = Path(__file__).parents[1] / "src/lowtide/memory/data/bundled_costs.json"
# What a machine, its threads or its clock set.
LOCAL = {"sha256", "device", "precision", "threads", "clock_ratio", "points", "context_bytes"}


def measured(name: str) -> dict[str, Any]:
    """Return the costs of a bundled model in fp32 on the CPU that hold on any machine."""
    kind = UpscaleSettings if describe_bundled(name).noise is None else DenoiseSettings
    model = load_model(kind.of(model=name))
    facts, network = model.descriptor, build_network(model, "cpu", "fp32")
    costs, complete = probe_costs(
        network,
        sha256=facts.sha256,
        weight_bytes=network_weight_bytes(network, model),
        align=facts.size.multiple_of,
        minimum=facts.size.minimum,
    )
    assert complete
    return costs.model_dump(mode="json", exclude=LOCAL)


def larger(found: dict[str, Any], known: dict[str, Any] | None) -> dict[str, Any]:
    """Return costs with the larger of each point's memory, if both are of the same work."""
    points = found["traced_points"]
    before = [] if known is None else known["traced_points"]
    if [one["multiply_adds"] for one in points] != [one["multiply_adds"] for one in before]:
        return found
    pairs = zip(points, before, strict=True)
    return {
        **found,
        "traced_points": [max(pair, key=lambda one: one["peak_bytes"]) for pair in pairs],
    }


if __name__ == "__main__":
    shipped = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    found = {
        sha256: larger(measured(name), shipped.get(sha256))
        for name in bundled_names()
        if (sha256 := describe_bundled(name).sha256)
    }
    TARGET.write_text(json.dumps(found, indent=1) + "\n")
