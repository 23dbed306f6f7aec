"""Command `lowtide train sr`: train a super-resolution model within a budget."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.shell import handle_errors, option, stderr_is_terminal
from lowtide.core.errors import UsageError
from lowtide.core.units import format_seconds

if TYPE_CHECKING:
    from lowtide.jobs.train_sr import TrainReport
    from lowtide.training.trainer import StepEvent

_RUN, _OUT = "Run", "Output"
EXAMPLE = """\
# An upscaler, trained on photographs. Folders are searched recursively.
name: nano-x2
scale: 2
manual_seed: 0
precision: bf16            # fp32, bf16, fp16 (GPU)
datasets:
  train:
    dataroot_gt: [photographs]
    # dataroot_lq: [small]  # pairs by name; without it, they are downscaled:
    degradation: bicubic   # or real: blur, noise and JPEG, twice
    lq_size: 32
    batch_size_per_gpu: 16
    color: true
  val:
    dataroot_gt: [validation]
network_g:
  type: paragonsr2_nano    # micro, tiny, xs, s, m, l, xl, realtime, stream, photo, pro
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


@handle_errors
def sr(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help=("A YAML file; --example prints one."))
    ] = None,
    output: Annotated[
        Path,
        option(
            "-o",
            "--output",
            panel=_OUT,
            metavar="FOLDER",
            help=(
                "Parent of the run's folder with weights, states and log. An existing run resumes."
            ),
        ),
    ] = Path("experiments"),
    budget: Annotated[
        str,
        option(
            panel=_RUN,
            metavar="BYTES",
            help=(
                "Memory that a step may take: 6GiB, 80% of what is free, or auto. The batch is"
                " split into as many micro-batches as needed."
            ),
        ),
    ] = "auto",
    device: Annotated[str, option(panel=_RUN, help="auto, cpu, cuda:0, ...")] = "auto",
    accept_changed_data: Annotated[
        bool,
        option(
            "--accept-changed-data",
            panel=_RUN,
            help=("Resume although the training images have changed since the run began."),
        ),
    ] = False,
    example: Annotated[
        bool,
        option("--example", panel=_OUT, help=("Print an example configuration and exit.")),
    ] = False,
    quiet: Annotated[bool, option("-q", "--quiet", panel=_OUT, help="No progress.")] = False,
    as_json: Annotated[
        bool, option("--json", panel=_OUT, help="Print the report as JSON on stdout.")
    ] = False,
) -> None:
    """Train an upscaler within a memory budget, or resume a run.

    The memory of a step is predicted before the first one. Ctrl-C saves the state of the step; the
    same command resumes from there, also after a crash, with the losses of a run that was never
    stopped. Validation images are upscaled as `lowtide upscale` does it: exactly.
    """
    if example:
        if as_json:
            raise UsageError("--example prints YAML, which contradicts --json", hint="drop one")
        typer.echo(EXAMPLE, nl=False)
        return
    if config is None:
        raise UsageError("no configuration is given", hint="lowtide train sr CONFIG.yaml")
    from lowtide.jobs.train_sr import train_sr
    from lowtide.training.distributed import ProcessGroup

    say = (lambda text: None) if quiet else (lambda text: typer.echo(text, err=True))
    with _until_interrupted() as stop:
        report = train_sr(
            config,
            output,
            budget=budget,
            device=device,
            cancel=stop,
            accept_changed_data=accept_changed_data,
            on_plan=lambda plan: say(str(plan)),
            on_step=None if quiet else ProgressLines(),
            on_warning=lambda text: typer.echo(f"warning: {text}", err=True),
        )
    if ProcessGroup.from_environment().is_main:
        typer.echo(report.model_dump_json(indent=2) if as_json else _text(report))


@contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, so that the current step is finished and saved.

    A second Ctrl-C stops at once.
    """
    stop = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class ProgressLines:
    """Training progress: a line at intervals, shorter ones on a terminal."""

    def __init__(self) -> None:
        self._every = 1.0 if stderr_is_terminal() else 10.0
        self._last_shown = 0.0
        self._first: int | None = None

    def __call__(self, event: StepEvent) -> None:
        if self._first is None:
            self._first = event.step - 1
        if event.seconds - self._last_shown < self._every and event.step < event.total:
            return
        self._last_shown = event.seconds
        left = event.seconds / (event.step - self._first) * (event.total - event.step)
        losses = ", ".join(f"{name} {value:.4g}" for name, value in event.losses.items())
        typer.echo(
            f"step {event.step:,} of {event.total:,}: {losses}, {format_seconds(left)} left",
            err=True,
        )


def _text(report: TrainReport) -> str:
    lines = [f"{report.name}: {report.steps:,} steps, {report.parameters:,} parameters"]
    if report.resumed_step:
        lines.append(f"resumed after step {report.resumed_step:,}")
    lines += [f"{name}: {score:.4f}" for name, score in report.scores.items()]
    lines += [f"warning: {text}" for text in report.warnings]
    lines += [f"skipped: {path} ({why})" for path, why in report.skipped_images.items()]
    lines.append(f"weights: {report.weights}")
    if report.best_weights:
        lines.append(f"best:    {report.best_weights}")
    return "\n".join(lines)
