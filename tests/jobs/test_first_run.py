"""A model that this machine never ran: probed within the budget, then remembered."""

import json
import os
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch

import lowtide
from lowtide import Cancelled
from lowtide.jobs.model_costs import stored_costs
from lowtide.jobs.planning_process import PlanningProcess
from lowtide.jobs.upscale_job import UpscaleJob
from lowtide.jobs.upscale_settings import UpscaleSettings
from lowtide.media.discover import FilePair
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


@pytest.fixture
def order(tmp_path, source, monkeypatch):
    """What `PlanningProcess.measure` is called with, and an empty cache."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))

    def of(budget):
        settings = UpscaleSettings.of(budget=budget)
        pair = FilePair(source, tmp_path / "out.png", source.name)
        return settings, settings.parse_budget("cpu", tmp_path), [pair]

    return of


def test_a_large_budget_needs_no_process_to_measure_in(order, tmp_path):
    with PlanningProcess(UpscaleJob) as planner:
        assert not planner.measure(*order("1GiB"))
    assert not (tmp_path / "cache").exists()


def test_measuring_in_another_process_can_be_cancelled(order, tmp_path):
    stop = threading.Event()
    stop.set()
    with PlanningProcess(UpscaleJob, cancel=stop) as planner, pytest.raises(Cancelled):
        planner.measure(*order("64MiB"))


def test_a_process_that_is_gone_measures_nothing(order):
    with PlanningProcess(UpscaleJob) as planner:
        assert planner.measure(*order("64MiB"))
        assert planner._process is not None
        planner._process.kill()
        assert not planner.measure(*order("64MiB"))
        assert planner.measure(*order("64MiB"))  # another one starts


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
