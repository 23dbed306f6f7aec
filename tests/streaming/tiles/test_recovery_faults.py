"""Faults at single allocations of real runs: the same bytes, and only what failed done again."""

import gc
import hashlib
import random

import numpy as np
import pytest
import torch
from virtual_device import VirtualDevice

import lowtide
from lowtide.jobs.images import prepare
from lowtide.jobs.images.adapter import ImageAdapter
from lowtide.jobs.images.model_costs import store_costs
from support.toy_models import costs, make_plan, network, run_array

REACH = 7  # of lowtide-x2
REPEATED = "out of memory once: the failed step was repeated and succeeded"


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Every recovery collects garbage; it need not look at all of PyTorch each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    return lowtide.load("lowtide-x2").module


def digest(x):
    return hashlib.sha256(x.contiguous().numpy().tobytes()).digest()


class Runs:
    """One image through the bundled model in tiles, with and without faults."""

    def __init__(self, model, array, **wishes):
        self.model, self.array = model, array
        self.plan = make_plan(array, REACH, **wishes)
        self.forwards = []
        device = VirtualDevice()
        with device:
            self.result, _ = run_array(network(self.forward), array, self.plan)
        self.calm, self.forwards = self.forwards, []
        self.device = device

    def forward(self, x):
        self.forwards.append(digest(x))
        return self.model(x)

    @property
    def steps(self):
        """The allocations of the network and what belongs to it."""
        return range(self.device.allocations)

    def disturbed(self, fail_at=None, capacity=None):
        self.forwards = []
        with VirtualDevice(capacity, fail_at=fail_at):
            return run_array(network(self.forward), self.array, self.plan)

    def check(self, number):
        """Byte for byte the same, and at most one tile through the network twice."""
        result, outcome = self.disturbed(fail_at=number)
        assert result.tobytes() == self.result.tobytes()
        assert outcome.events == [REPEATED]
        assert only_one_again(self.forwards, self.calm)
        return len(self.forwards) - len(self.calm)


def only_one_again(seen, calm):
    """Whether ``seen`` is ``calm`` but for one entry that may stand twice in a row."""
    if len(seen) == len(calm):
        return seen == calm
    place = next((i for i, (a, b) in enumerate(zip(seen, calm, strict=False)) if a != b), len(calm))
    return seen[place] == seen[place - 1] and seen[:place] + seen[place + 1 :] == calm


@pytest.fixture(scope="module")
def runs(model, photo):
    return Runs(model, photo[100:190, 200:300], tile=64)


def test_a_fault_in_any_step_changes_nothing(runs):
    numbers = random.Random(0).sample(runs.steps, 20)
    again = [runs.check(number) for number in numbers]
    assert 0 < sum(again) <= len(again)


def test_a_fault_while_tiles_are_merged_repeats_no_tile(runs, monkeypatch):
    convert, fails = ImageAdapter.to_sink, iter([False] * 9 + [True])

    def faulty(self, floats):
        if next(fails, False):
            raise MemoryError
        return convert(self, floats)

    monkeypatch.setattr(ImageAdapter, "to_sink", faulty)
    result, outcome = runs.disturbed()
    assert result.tobytes() == runs.result.tobytes()
    assert outcome.events == [REPEATED]
    assert runs.forwards == runs.calm


@pytest.mark.parametrize("sample", ["uint16", "float32"])
@pytest.mark.parametrize("wishes", [dict(batch=2), dict(hann_blend=True)], ids=str)
def test_a_fault_in_other_kinds_of_runs(model, photo, sample, wishes):
    array = photo[:90, :100]
    array = array.astype(np.uint16) * 257 if sample == "uint16" else array.astype(np.float32) / 255
    runs = Runs(model, array, tile=64, **wishes)
    for number in random.Random(1).sample(runs.steps, 3):
        runs.check(number)


def test_a_second_fault_divides_the_tile_and_keeps_what_was_done(runs):
    number = runs.steps[len(runs.steps) // 2]
    result, outcome = runs.disturbed(fail_at={number, number + 1})
    assert np.abs(result.astype(int) - runs.result).max() <= 1
    assert outcome.events == ["out of memory: tiles of 64×64 are divided from here on"]
    finished = runs.steps.index(number) * runs.plan.strategy.tiles // len(runs.steps)
    assert runs.forwards[:finished] == runs.calm[:finished]
    assert not set(runs.forwards[finished + 2 :]) & set(runs.calm[:finished])


def test_a_device_with_less_than_lives_at_once(model, photo):
    runs = Runs(model, photo[:320, :400], strategy="whole")
    result, outcome = runs.disturbed(capacity=runs.device.peak_reserved)
    assert (outcome.events, result.tobytes()) == ([], runs.result.tobytes())
    result, outcome = runs.disturbed(capacity=runs.device.peak_live_bytes - 1)
    assert outcome.events == ["out of memory: tiles of 400×320 are divided from here on"]
    assert np.abs(result.astype(int) - runs.result).max() <= 1


class Job:
    """The same through files and the whole job."""

    def __init__(self, folder, source, read):
        self.folder, self.source, self.read = folder, source, read
        self.forwards = []
        device = self.run("calm")
        self.calm, self.calm_forwards = read(folder / "calm.png"), self.forwards
        self.numbers = range(self.begun, device.allocations)

    def run(self, name, fail_at=None):
        self.forwards = []
        device = VirtualDevice(fail_at=fail_at)

        def progress(moment):
            if moment.phase == "run" and moment.done == 0:
                self.begun = device.allocations  # before come those of loading the model

        with device:
            report = lowtide.upscale(
                self.source,
                self.folder / f"{name}.png",
                tile=64,
                budget="256MiB",
                force=True,
                progress=progress,
            )
        self.events = report.images[0].events
        return device

    def check(self, number):
        self.run("faulty", fail_at=number)
        assert self.events == [REPEATED]
        assert self.read(self.folder / "faulty.png").tobytes() == self.calm.tobytes()
        assert only_one_again(self.forwards, self.calm_forwards)


@pytest.fixture
def job(tmp_path, monkeypatch, read):
    """Make a job of a picture file; the model's costs are known, and its forwards noted."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    jobs = []

    def load(name):
        model = lowtide.load(name)
        model.module.register_forward_pre_hook(
            lambda module, args: jobs[0].forwards.append(digest(args[0]))
        )
        return model

    sha256 = lowtide.load("lowtide-x2").descriptor.sha256
    known = costs(REACH).model_copy(update={"sha256": sha256})
    store_costs(known, sha256)
    monkeypatch.setattr(prepare, "load", load)

    def make(source):
        job = Job.__new__(Job)
        jobs[:] = [job]
        job.__init__(tmp_path, source, read)
        return job

    return make


def test_a_fault_in_a_job(job, tmp_path, save, photo):
    job = job(save(tmp_path / "in.png", photo[100:200, 200:320]))
    job.check(job.numbers[len(job.numbers) // 3])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["8 bits", "16 bits with alpha"])
def test_a_hundred_faults_in_jobs(job, tmp_path, save, photo, kind):
    array = photo[100:230, 200:330]
    if kind != "8 bits":
        alpha = np.full((*array.shape[:2], 1), 40000, np.uint16)
        array = np.concatenate([array.astype(np.uint16) * 257, alpha], 2)
    job = job(save(tmp_path / "in.png", array))
    assert len(job.numbers) > 150
    for number in random.Random(2).sample(job.numbers, 100):
        job.check(number)
