"""A model that this machine never ran: probed within the budget, then remembered."""

import lowtide
from lowtide.memory.store import CostStore


def test_a_small_budget_limits_the_probe_and_is_not_remembered(
    source, tmp_path, monkeypatch, model
):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    report = lowtide.upscale(source, tmp_path / "out.png", budget="64MiB")
    image = report.images[0]
    assert image.status == "done"
    assert image.accuracy.execution == "exact"
    # What a limit cut short is measured again with more room.
    store = CostStore()
    assert store.get(store.key(model.descriptor.sha256, "cpu", "fp32")) is None
