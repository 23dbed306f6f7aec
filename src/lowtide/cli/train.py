"""Commands `lowtide train KIND`: train a model within a budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.command_group import make_command
from lowtide.cli.common_options import JsonReport, Quiet, option, output_option
from lowtide.cli.config_options import ConfigKeyAlias, Given, config_command, config_from_options
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import join_lines, report_errors, stderr_is_terminal
from lowtide.cli.stop_signals import finish_step
from lowtide.core.errors import UsageError
from lowtide.core.input_file import is_folder
from lowtide.core.units import format_seconds
from lowtide.jobs.train.settings import TrainRunSettings

if TYPE_CHECKING:
    from lowtide.jobs.train.run import TrainReport
    from lowtide.training.run_config import RunConfig
    from lowtide.training.task import TrainTask
    from lowtide.training.trainer import TrainStepEvent


@dataclass(frozen=True)
class TrainKind:
    """A kind of training: what `lowtide train NAME` needs of it.

    ``example`` returns a configuration. ``config``, ``job`` and ``task`` import the configuration
    class, the job and the function that builds its task, by which it is planned. ``data`` is the
    key that DATA stand for: folders, or with ``data_is_file`` one file. ``aliases`` are more
    options.
    """

    name: str
    help: str
    example: Callable[[], str]
    config: Callable[[], type[RunConfig]]
    job: Callable[[], Callable[..., TrainReport]]
    task: Callable[[], Callable[..., TrainTask]]
    data: tuple[str, ...] = ("datasets", "train", "dataroot_gt")
    data_is_file: bool = False
    aliases: tuple[ConfigKeyAlias, ...] = ()

    def data_value(self, data: list[Path]) -> str | list[str]:
        """Return the value of the key that DATA stand for."""
        if not self.data_is_file:
            return [str(one) for one in data]
        if len(data) > 1:
            raise UsageError(
                f"{len(data)} files are given, and the training is of one",
                hint=f"lowtide train {self.name} {data[0]}",
            )
        return str(data[0])


def train_command(kind: TrainKind) -> Any:
    """Return the command of a kind of training."""

    @report_errors
    @with_settings(TrainRunSettings, "context words output")
    def train(
        context: typer.Context,
        words: Annotated[
            list[Path] | None,
            typer.Argument(
                metavar="[CONFIG.yml] [DATA]...",
                help="A YAML file, which --example prints; the data to train on.",
                show_default=False,
            ),
        ] = None,
        output: Annotated[
            Path,
            output_option(
                "Parent of the run's folder with weights, states and log. An existing run resumes.",
                panel="Output",
                metavar="FOLDER",
            ),
        ] = Path("experiments"),
        example: Annotated[
            bool,
            option("--example", panel="Output", help="Print an example configuration and exit."),
        ] = False,
        quiet: Quiet = False,
        as_json: JsonReport = False,
        **settings: Any,
    ) -> None:
        if example:
            if as_json:
                raise UsageError("--example prints YAML, which contradicts --json", hint="drop one")
            typer.echo(kind.example(), nl=False)
            return
        config = training_config(kind, context, words or [])
        from lowtide.training.distributed import ProcessGroup

        say = (lambda text: None) if quiet else (lambda text: typer.echo(text, err=True))
        with finish_step() as stop:
            report = kind.job()(
                config,
                output,
                cancel=stop,
                on_plan=lambda plan: say(str(plan)),
                on_step=None if quiet else TrainProgressPrinter(),
                on_warning=lambda text: typer.echo(f"warning: {text}", err=True),
                **settings,
            )
        if ProcessGroup.from_environment().is_main:
            typer.echo(report.model_dump_json(indent=2) if as_json else str(report))

    train.__doc__ = join_lines(kind.help)
    return make_command(train, kind.name, config_command(kind.config, kind.aliases))


def is_config(path: Path) -> bool:
    """Return whether the first word of a command is the configuration's file."""
    return path.suffix.lower() in (".yml", ".yaml") and not is_folder(path)


def training_config(kind: TrainKind, context: typer.Context, words: list[Path]) -> RunConfig:
    """Return the configuration of the file, data and options of a command."""
    path, data = (words[0], words[1:]) if words and is_config(words[0]) else (None, words)
    more: Given = {}
    if data:
        more[kind.data] = "DATA", lambda: kind.data_value(data)
        if path is None:
            more["name",] = "--name", lambda: _default_name(kind, data[0])
    config = config_from_options(kind.config(), context, path, more)
    if config is None:
        raise UsageError(
            "neither a configuration nor data are given",
            hint=f"lowtide train {kind.name} CONFIG.yml, or data and options: --help",
        )
    return config


def _default_name(kind: TrainKind, data: Path) -> str:
    """Return a run's name after its first folder or file of data."""
    name = data.stem if kind.data_is_file else data.resolve().name
    word = re.sub(r"[^\w-]+", "-", name).strip("-")[:80]
    return f"{word or 'run'}-{kind.name}"


class TrainProgressPrinter:
    """Training progress: a line at intervals, shorter ones on a terminal."""

    def __init__(self) -> None:
        self._every = 1.0 if stderr_is_terminal() else 10.0
        self._last_shown = 0.0
        self._first: int | None = None

    def __call__(self, event: TrainStepEvent) -> None:
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
