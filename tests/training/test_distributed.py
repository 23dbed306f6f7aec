"""Two processes take the steps of one, write once, and stop together."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from lowtide import UsageError
from lowtide.training.data.batches import BatchLoader
from lowtide.training.data.degrade import bicubic_downscale
from lowtide.training.data.pairs import HighResolutionFolders, PatchSamples
from lowtide.training.distributed import ProcessGroup

CONFIG = """
name: {name}
scale: 2
datasets:
  train: {{dataroot_gt: [{folder}], lq_size: 16, batch_size_per_gpu: {batch}}}
network_g: {{type: paragonsr2_nano, window: 8, shared: 2}}
network_d: {{type: munet, features: 8, widths: [1, 2], window: 8, shared: 2}}
train:
  total_iter: {steps}
  losses: [{{type: l1loss}}, {{type: ganloss, gan_type: r3gan, loss_weight: 0.1, r1_weight: 1.0}}]
  grad_clip: 1.0
logger: {{print_freq: 1, save_checkpoint_freq: 2}}
"""


@pytest.fixture
def folder(tmp_path, save, photo):
    for number in range(3):
        save(tmp_path / "photos" / f"{number}.png", photo[100 * number :][:96, :96])
    return tmp_path / "photos"


@pytest.fixture
def words(tmp_path, folder):
    """The command for a configuration, by ``processes`` processes."""

    def made(name, batch, processes, steps=4):
        config = tmp_path / f"{name}.yml"
        config.write_text(CONFIG.format(name=name, folder=folder, batch=batch, steps=steps))
        many = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(processes),
            "--master-port",
            "0",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
        return [
            sys.executable,
            *(many if processes > 1 else []),
            "-m",
            "lowtide",
            "train",
            "sr",
            str(config),
            "-o",
            str(tmp_path),
            "--device",
            "cpu",
            "--budget",
            "2GiB",
        ]

    return made


def run(words):
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_take_the_steps_of_one(tmp_path, words):
    run(words("one", 4, 1))
    finished = run(words("two", 2, 2))
    assert finished.stdout.count("two: 4 steps") == 1
    one, two = (log_of(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 4
    for ours, theirs in zip(one, two, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4)
    weights, others = (load_file(tmp_path / one / f"{one}.safetensors") for one in ("one", "two"))
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-5)
    # After the last state is lost, they go on from the one before it.
    (tmp_path / "two" / "training_states" / "4.state").unlink()
    assert "resumed after step 2" in run(words("two", 2, 2)).stdout
    assert log_of(tmp_path / "two") == two
    # A single one would take steps of half the batch.
    alone = subprocess.run(words("two", 2, 1), capture_output=True, text=True)
    assert alone.returncode == 2
    assert "another number of processes" in alone.stderr


@pytest.mark.slow
def test_both_stop_after_one_step(tmp_path, words):
    job = subprocess.Popen(
        words("long", 2, 2, steps=100_000),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log, limit = tmp_path / "long" / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert job.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=120)
    assert job.returncode, said
    kept = {int(path.stem) for path in (tmp_path / "long" / "training_states").glob("*.state")}
    assert max(kept) == log_of(tmp_path / "long")[-1]["step"]


def test_shares_are_the_batch(folder):
    data = PatchSamples(HighResolutionFolders([folder], 2, bicubic_downscale), 8)
    given = dict(batch=6, seed=3)
    whole = BatchLoader(data, **given).at(2)
    for side in (0, 1):
        parts = [BatchLoader(data, **given, shard=(rank, 3)).at(2)[side] for rank in range(3)]
        assert [len(part) for part in parts] == [2, 2, 2]
        assert torch.equal(torch.cat(parts), whole[side])
    with pytest.raises(UsageError, match="a batch of 6 has no share for rank 0 of 4"):
        BatchLoader(data, **given, shard=(0, 4))


def test_alone_nothing_is_exchanged(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    one = ProcessGroup.from_environment()
    assert one.is_single and one.is_main
    number = torch.ones(2)
    one.all_reduce([number])
    assert number.tolist() == [1, 1]
    assert one.mean({"loss": 2.0}, torch.device("cpu")) == {"loss": 2.0}
    assert one.any(True, torch.device("cpu")) and not one.any(False, torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert ProcessGroup.from_environment() == ProcessGroup(2, 1, 0)
    assert not ProcessGroup.from_environment().is_main
