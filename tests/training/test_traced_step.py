"""The predicted memory of a step, against the trainer's own step."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.prediction.estimate import traced_estimate
from lowtide.memory.profiles import load_profile
from lowtide.training.setup import make_discriminator, make_generator
from lowtide.training.tasks.sr_config import SrConfig
from lowtide.training.tasks.super_resolution import make_pairs_task
from lowtide.training.traced_step import TaskModules, TracedTrainStep
from lowtide.training.trainer import Trainer

GAN = {"type": "ganloss", "loss_weight": 0.1, "start_iter": 0}


def config_of(losses, network="paragonsr2_nano", judge=False, **train):
    return SrConfig.from_values(
        {
            "name": "planned",
            "scale": 2,
            "datasets": {"train": {"dataroot_gt": "none", "lq_size": 24, "batch_size_per_gpu": 4}},
            "network_g": {"type": network},
            **({"network_d": {"type": "munet", "features": 8, "widths": [1, 2]}} if judge else {}),
            "train": {"total_iter": 9, "losses": losses, **train},
        }
    )


def task_of(config):
    judge = make_discriminator(config.network_d, 0) if config.network_d else None
    generator = make_generator(config.network_g, config.scale, 0)
    return make_pairs_task(config, generator, None, judge)


@pytest.mark.grid(3)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "config",
    [
        config_of([{"type": "l1loss"}]),
        config_of([{"type": "l1loss"}, {"type": "charbonnierloss"}, {"type": "fftloss"}]),
        config_of([{"type": "l1loss"}, GAN], judge=True),
        config_of([{"type": "l1loss"}, {**GAN, "r1_weight": 1.0}], judge=True),
        config_of([{"type": "l1loss"}, GAN], "paragonsr2_s", judge=True, checkpointing="full"),
    ],
    ids=["pixels", "several losses", "adversarial", "penalized", "checkpointed"],
)
def test_the_traced_step_holds_what_the_trainers_step_holds(config, parts, tmp_path):
    low, high = torch.rand(4, 3, 24, 24), torch.rand(4, 3, 48, 48)
    task = task_of(config)
    found = traced_estimate(
        TaskModules(config, task),
        TracedTrainStep((low, high), config, task.optims, parts),
        load_profile("cpu"),
    )
    made = ("live activations", "workspace", "gradients")
    predicted = sum(row.value for row in found.ledger if row.name in made)
    trainer = Trainer(config, tmp_path, task_of(config), micro_batches=parts)
    for _ in range(3):  # makes the optimizers' state, and sees that weights have gradients
        trainer._run_step((low, high))
    taken = live_peak_bytes(lambda: trainer._run_step((low, high)))
    # Operators' buffers of a few KiB are not predicted.
    assert abs(predicted - taken) <= 0.01 * taken + low.nbytes


def test_a_network_with_attention_is_traced_for_an_absent_gpu():
    # In a process of its own: a backend is tried once in each.
    code = """
import torch
from lowtide import InferenceStep, estimate
from lowtide.attention.spatial import LocalWindowAttention
step = InferenceStep((torch.empty(1, 16, 64, 64, device="meta"),))
print(estimate(LocalWindowAttention(16), step, device="rtx3060-12gb").method)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["traced"]
