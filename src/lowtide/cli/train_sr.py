"""Command `lowtide train sr`: train a super-resolution model within a budget."""

from __future__ import annotations

import textwrap
from typing import Any

from lowtide.cli.train import TrainKind, train_command

_EXAMPLE = """\
# An upscaler, trained on photographs. Folders are searched recursively.
name: nano-x2
scale: 2
manual_seed: 0
precision: fp32            # bf16 and fp16 are faster on GPUs, and on few processors
datasets:
  train:
    dataroot_gt: [photographs]
    # dataroot_lq: [small]  # pairs by name; without it, they are downscaled:
    degradation: bicubic   # photo: slightly degraded JPEGs; real: strong blur, noise, JPEG, twice
    lq_size: 32
    batch_size_per_gpu: 16
    color: true
  val:
    dataroot_gt: [validation]
network_g:
  type: NETWORK
train:
  total_iter: 10000
  warmup_iter: 300
  losses:
    - type: l1loss
  optim_g: {type: adamw, lr: 1.0e-3}
  scheduler: {type: cosine}
  ema_decay: 0.999
val:
  val_freq: 1000
  metrics:
    psnr: {type: psnr, test_y_channel: true}
logger:
  print_freq: 100
  save_checkpoint_freq: 1000
"""


def example() -> str:
    """Return an example configuration, which names the networks that there are."""
    from lowtide.models.families import network_builders, usual_network

    usual = usual_network("generators")
    others = ", ".join(name for name in network_builders("generators") if name != usual)
    comment = textwrap.fill(f"or {others}", 96, initial_indent="  # ", subsequent_indent="  # ")
    return _EXAMPLE.replace("NETWORK", f"{usual}\n{comment}")


def _config() -> type[Any]:
    from lowtide.training.tasks.sr_config import SrConfig

    return SrConfig


def _job() -> Any:
    from lowtide.jobs.upscale.train import train_sr

    return train_sr


def _task() -> Any:
    from lowtide.jobs.upscale.train import make_sr_task

    return make_sr_task


SR = TrainKind(
    "sr",
    help="""Train an upscaler within a memory budget, or resume a run.

    DATA are folders of photographs, the same as --datasets.train.dataroot-gt. Every key of the
    configuration is also an option, with the name of its section or without it where that is
    clear (--train.total-iter, --total-iter), and overrides the file. Without a file the options
    are enough: lowtide train sr photographs --scale 2 --total-iter 10000.

    The memory of a step is predicted before the first one. Ctrl-C saves the state of the step; the
    same command resumes from there, also after a crash, with the losses of a run that was never
    stopped. Validation images are upscaled as `lowtide upscale` does it: exactly.
    """,
    example=example,
    config=_config,
    job=_job,
    task=_task,
)
SR_COMMAND = train_command(SR)
