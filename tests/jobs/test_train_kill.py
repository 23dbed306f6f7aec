"""Killed while a state or a row is written, a training goes on to the same bytes."""

import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import pyvips
import yaml

pytestmark = pytest.mark.slow
_KILLS, _STEPS = 20, 48
_MOMENTS = ("row", "state", "before the name", "after the name")
# Trains, and is gone in the middle of the so manieth write of one kind.
_RUN = """
import io, os, signal, sys
from pathlib import Path

import torch

from lowtide.jobs.upscale.train import train_sr

config, folder, moment, left = *sys.argv[1:4], int(sys.argv[4])
write, save, rename = os.write, torch.save, Path.replace

def due():
    global left
    left -= 1
    return left == 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def write_and_die(file, data):
    if due():
        write(file, bytes(data)[: len(data) // 2])
        die()
    return write(file, data)

def save_and_die(what, path):
    if not due():
        return save(what, path)
    made = io.BytesIO()
    save(what, made)
    Path(path).write_bytes(made.getvalue()[: len(made.getvalue()) // 2])
    die()

def rename_and_die(path, target):
    last = due()
    if last and moment == "before the name":
        die()
    named = rename(path, target)
    if last:
        die()
    return named

if moment == "row":
    os.write = write_and_die
elif moment == "state":
    torch.save = save_and_die
elif moment:
    Path.replace = rename_and_die
print(train_sr(config, folder).resumed_step)
"""


def given(photos):
    return {
        "name": "mine",
        "scale": 2,
        "datasets": {"train": {"dataroot_gt": str(photos), "lq_size": 8, "batch_size_per_gpu": 2}},
        "network_g": {"type": "paragonconv", "features": 8, "blocks": 1},
        "train": {"total_iter": _STEPS, "optim_g": {"lr": 1e-3}},
        "logger": {"print_freq": 1, "save_checkpoint_freq": 1},
    }


def train(config, folder, moment="", left=0):
    words = [sys.executable, "-c", _RUN, str(config), str(folder), moment, str(left)]
    return subprocess.run(words, capture_output=True, text=True)


def test_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    drawn, photos = np.random.default_rng(0), tmp_path / "photos"
    photos.mkdir()
    noise = drawn.integers(0, 256, (40, 48, 3), np.uint8)
    pyvips.Image.new_from_array(noise).pngsave(str(photos / "a.png"))
    config = tmp_path / "c.yml"
    config.write_text(yaml.safe_dump(given(photos)))
    undisturbed = train(config, tmp_path / "whole")
    assert undisturbed.returncode == 0, undisturbed.stderr

    chance, moments = random.Random(0), [*_MOMENTS] * (_KILLS // len(_MOMENTS))
    chance.shuffle(moments)
    for moment in moments:
        killed = train(config, tmp_path / "killed", moment, chance.randint(2, 4))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = train(config, tmp_path / "killed")
    assert last.returncode == 0, last.stderr
    assert 0 < int(last.stdout) < _STEPS
    for name in ("log.jsonl", "mine.safetensors", "config.json"):
        made, expected = (tmp_path / run / "mine" / name for run in ("killed", "whole"))
        assert made.read_bytes() == expected.read_bytes(), name
    left = [path for path in (tmp_path / "killed").rglob("*") if path.name.endswith(".part")]
    assert not left
