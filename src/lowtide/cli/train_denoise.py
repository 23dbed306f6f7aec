"""Command `lowtide train denoise`: train a denoiser within a budget."""

from __future__ import annotations

from typing import Any

from lowtide.cli.config_options import ConfigKeyAlias
from lowtide.cli.train import TrainKind, train_command

EXAMPLE = """\
# A denoiser of photographs, as lowtide denoise takes it. Folders are searched recursively.
name: night
manual_seed: 0
precision: fp32            # fp32, bf16, fp16 (GPU)
datasets:
  train:
    dataroot_gt: [photographs]
    patch_size: 96
    batch_size_per_gpu: 8
    noise: gaussian        # poisson-gaussian, or camera.json of lowtide train noise
    sigma: [0, 60]         # levels at mid-gray, of 255, where noise is no table
    clipped: 0.25          # share with values clipped and rounded to 8 bits
    gray: 0.5
    # linear: true         # photographs to linear values first: for undeveloped files
    # cfa: RGGB            # mosaics, with network.channels 1
  val:
    dataroot_gt: [validation]
network:
  channels: 3
  features: 32
  multipliers: [1, 2, 4]
  attention: linear        # channel, transposed, sdpa, flash, window, none
  attention_levels: [-1]   # the lowest
  prediction: v            # epsilon, sample
  scheduler: ddim          # ddpm, flow: of lowtide denoise --steps N
train:
  total_iter: 20000
  warmup_iter: 100
  optim: {type: adamw, lr: 2.0e-3, weight_decay: 1.0e-3}
  scheduler: {type: cosine}
  ema_decay: 0.998
  checkpointing: none      # full: less memory, more time
val:
  val_freq: 1000
logger:
  print_freq: 100
  save_checkpoint_freq: 1000
"""


def _config() -> type[Any]:
    from lowtide.training.tasks.denoise_config import DenoiseConfig

    return DenoiseConfig


def _job() -> Any:
    from lowtide.jobs.denoise.train import train_denoise

    return train_denoise


def _task() -> Any:
    from lowtide.jobs.denoise.train import make_denoise_task

    return make_denoise_task


DENOISE = TrainKind(
    "denoise",
    help="""Train a denoiser within a memory budget, or resume a run.

    DATA are folders of photographs without noise, the same as --datasets.train.dataroot-gt. Every
    key of the configuration is also an option, which overrides the file. Without one the options
    are enough: lowtide train denoise photographs --total-iter 20000.

    Noise is added in training: --noise gaussian, poisson-gaussian, or camera.json, the table of
    lowtide train noise. With a table, photographs become linear (--linear) where it is of
    undeveloped files; the weights name the table, and lowtide denoise --noise camera.json --iso N
    requires it.

    --sd-attn-type is --attention, --sd-scheduler is --network.scheduler, --batch-size is
    --batch-size-per-gpu.

    The memory of a step is predicted before the first one. Ctrl-C saves the state of the step; the
    same command resumes from there, with the losses of a run that was never stopped. Validation
    photographs are denoised as `lowtide denoise` does it. The weights of the run are a model:
    lowtide denoise photo.jpg -o clean.png -m FILE.
    """,
    example=lambda: EXAMPLE,
    config=_config,
    job=_job,
    task=_task,
    aliases=(
        ConfigKeyAlias("--sd-attn-type", ("network", "attention")),
        ConfigKeyAlias("--sd-scheduler", ("network", "scheduler")),
        ConfigKeyAlias("--use-gradient-checkpointing", ("train", "checkpointing"), "full"),
        ConfigKeyAlias("--batch-size", ("datasets", "train", "batch_size_per_gpu")),
    ),
)
DENOISE_COMMAND = train_command(DENOISE)
