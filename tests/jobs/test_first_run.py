"""A model that this machine never ran: probed within the budget, then remembered."""

import json
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch

import lowtide
from lowtide import Cancelled
from lowtide.jobs.images import plan_in_child
from lowtide.jobs.images.model_costs import stored_costs
from lowtide.streaming import certificate


def run_program(program, source, model, folder):
    """The words that a process of its own prints."""
    command = [sys.executable, "-c", program, str(source), str(folder / "out.png"), str(model)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_a_small_budget_limits_the_probe_and_is_not_remembered(
    source, tmp_path, monkeypatch, unmeasured
):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    # In a process of its own: what a probe leaves counts, and is more where others ran before.
    first = (
        "import sys, lowtide; source, target, model = sys.argv[1:];"
        " image = lowtide.upscale(source, target, model=model, budget='64MiB').images[0];"
        " print(image.status, image.accuracy.execution)"
    )
    assert run_program(first, source, unmeasured, tmp_path) == ["done", "exact"]
    # What a limit cut short is measured again with more room.
    sha256 = lowtide.load(unmeasured).descriptor.sha256
    assert stored_costs(sha256, "cpu", "fp32") is None
    assert stored_costs(sha256, "cpu", "fp32", 32 << 20) is not None


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ", tile=64"], ids=["traced", "measured"])
def test_a_first_plan_does_not_count_what_its_probe_leaves(
    source, tmp_path, monkeypatch, unmeasured, more
):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    program = (
        "import sys, lowtide; source, target, model = sys.argv[1:];"
        f" plan = lowtide.plan(source, target, model=model, budget='1GiB'{more}).images[0].plan;"
        " print(plan.predicted_bytes, {row.name: row.value for row in plan.ledger}['runtime'])"
    )
    first, second = (run_program(program, source, unmeasured, tmp_path) for _ in range(2))
    # The second one found all costs, and so is what a run in another process will take.
    assert first == second


def test_weights_in_both_precisions_are_counted(source, tmp_path, monkeypatch, model):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    image = lowtide.upscale(source, tmp_path / "out.png", precision="bf16").images[0]
    (weights,) = [row.value for row in image.plan.ledger if row.name == "weights"]
    exact = model.descriptor.weight_bytes
    # Those in fp32 are there to be compared with; a third of the others stays in fp32.
    low = lowtide.load("lowtide-x2").to_low_precision(torch.bfloat16)
    assert weights == exact + low.descriptor.weight_bytes
    assert 1.5 * exact < weights < 1.8 * exact


def upscale(source, folder, cache, budget, model):
    """A first run of the command line, with an empty cache, as JSON."""
    words = ["upscale", source, "-o", folder / "out.png", "--force", "--json", "-m", model]
    words += ["--budget", budget]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "LOWTIDE_CACHE": str(folder / cache)},
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_smallest_budget_that_is_named_works_on_a_machine_that_knows_nothing(
    tmp_path, save, photo, unmeasured
):
    source = save(tmp_path / "in.png", photo[:200, :300])
    smallest = upscale(source, tmp_path, "one", "1MiB", unmeasured)["error"]["smallest_bytes"]
    (image,) = upscale(source, tmp_path, "another", smallest, unmeasured)["images"]
    assert image["memory"]["budget_bytes"] == smallest
    assert image["memory"]["peak_bytes"] <= smallest


def test_bands_are_proved_outside_of_a_job_with_a_small_budget(tmp_path, save, photo, monkeypatch):
    """A dry run and a proof leave more memory than the run in bands takes."""
    program = """
import sys
from lowtide.core.heap import tune_heap
tune_heap()
import lowtide
from lowtide.streaming import certificate
from lowtide.streaming.planner import dry_run

def refuse(*given):
    raise AssertionError("computed in the job's process")

certificate._measure = dry_run._predict = refuse
run = lambda name: lowtide.upscale(name, sys.argv[2], budget=sys.argv[3], strategy="streamed")
images = run(sys.argv[1]).images
print([image.plan.strategy.name for image in images], *images[0].notes, sep="\\n")
"""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, height in ("one.png", 150), ("two.png", 170):
        save(folder / name, photo[:height, :200])

    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    small = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(tmp_path / "small"), "60MiB"],
        capture_output=True,
        text=True,
    )
    strategies, *notes = small.stdout.splitlines()
    assert strategies == "['streamed', 'streamed']", small.stderr
    assert any("proved in another process" in note for note in notes)
    # With room for it no process is started.
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(certificate, "_measure", mock.Mock(side_effect=AssertionError("here")))
    with pytest.raises(AssertionError, match="here"):
        lowtide.upscale(folder, tmp_path / "large", budget="1GiB", strategy="streamed")


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The processes that jobs start to plan, and an empty cache."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    processes, start = [], plan_in_child.start_python

    def noted(*given, **options):
        processes.append(start(*given, **options))
        return processes[-1]

    monkeypatch.setattr(plan_in_child, "start_python", noted)
    return processes


def test_a_size_is_planned_in_another_process_once(source, tmp_path, save, photo, started):
    def run(source=source, budget="60MiB"):
        target = tmp_path / "out.png"
        options: dict[str, Any] = {"budget": budget, "strategy": "streamed", "force": True}
        (image,) = lowtide.upscale(source, target, **options).images
        return len(started), any("in another process" in note for note in image.notes)

    assert run() == (1, True)
    assert run() == (1, False)
    other = save(tmp_path / "other.png", photo[:150, :200])
    assert run(other) == (2, True)
    # With room for it no process is started.
    larger = save(tmp_path / "larger.png", photo[:170, :200])
    assert run(larger, "1GiB") == (2, False)


def test_a_model_is_measured_in_another_process_once(source, tmp_path, unmeasured, started):
    def run():
        options: dict[str, Any] = {"budget": "64MiB", "model": unmeasured, "force": True}
        lowtide.upscale(source, tmp_path / "out.png", **options)
        return len(started)

    assert [run(), run()] == [1, 1]


def test_planning_in_another_process_can_be_cancelled(source, tmp_path, started):
    options: dict[str, Any] = {"budget": "60MiB", "cancel": lambda: bool(started)}
    with pytest.raises(Cancelled):
        lowtide.upscale(source, tmp_path / "out.png", strategy="streamed", **options)
    assert started[0].poll() is not None


def test_a_job_plans_itself_where_the_other_process_fails(source, tmp_path, started, monkeypatch):
    start = plan_in_child.start_python

    def start_another(main, *words, **options):
        return start("lowtide.core.heap:absent", *words, **options)

    monkeypatch.setattr(plan_in_child, "start_python", start_another)
    target = tmp_path / "out.png"
    (image,) = lowtide.upscale(source, target, budget="300MiB", strategy="streamed").images
    assert image.status == "done"
    assert len(started) == 1
    assert not any("in another process" in note for note in image.notes)
