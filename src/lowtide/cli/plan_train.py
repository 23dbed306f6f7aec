"""Commands `lowtide plan train`: predict the memory of a step of a model, or of a training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.command_group import AliasCommand, make_command
from lowtide.cli.common_options import Force, JsonReport, Quiet, option
from lowtide.cli.config_options import (
    ConfigKeyAlias,
    Given,
    config_command,
    config_from_options,
    config_keys,
)
from lowtide.cli.progress_bar import step_printer
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import join_lines, print_result, report_errors
from lowtide.cli.train import TrainKind, is_config, training_config
from lowtide.cli.train_denoise import DENOISE
from lowtide.cli.train_forecast import FORECAST
from lowtide.cli.train_sr import SR
from lowtide.core.errors import UsageError
from lowtide.jobs.train.settings import TrainPlanSettings, TrainSettings

if TYPE_CHECKING:
    from lowtide.training.run_config import RunConfig

_KINDS = {kind.name: kind for kind in (SR, DENOISE, FORECAST)}
_LDM4TS = "ldm4ts"
_BATCH = "datasets", "train", "batch_size_per_gpu"
_LDM4TS_ALIASES = (
    ConfigKeyAlias("--batch", _BATCH),
    ConfigKeyAlias("--batch-size", _BATCH),
    ConfigKeyAlias("--size", ("network", "image_size")),
)
_HELP = """Predict whether a training fits the memory, and what would make it fit.

It is planned as `lowtide train {name}` prepares it: with its networks, losses, optimizers and
averages, its batch split into micro-batches as the budget requires. Nothing is trained, and the
GPU need not be present. Arguments and keys are those of `lowtide train {name}`.
"""
AllDevices = Annotated[
    bool,
    option(
        "--all-devices",
        panel="Device",
        help="One line for every known GPU, up to the first option that fits.",
    ),
]
Words = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[CONFIG.yml] [DATA]...",
        help="A YAML file; the data to train on.",
        show_default=False,
    ),
]


class PlanTrainCommand(AliasCommand):
    """Command of modules, in whose place stands that of a training where one is named."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of the command that the words name."""
        name, words = report_errors(_named_training)(args)
        if name is None:
            return super().make_context(info_name, args, parent, **extra)
        return _command(name).make_context(f"{info_name} {name}", words, parent, **extra)


def _named_training(words: list[str]) -> tuple[str | None, list[str]]:
    """Return what training the words after ``plan train`` name, if any, and the others."""
    if words and words[0] in _KINDS:
        return words[0], words[1:]
    if _LDM4TS in words:
        at = words.index(_LDM4TS)
        return _LDM4TS, [*words[:at], *words[at + 1 :]]
    config = next((Path(word) for word in words if is_config(Path(word))), None)
    return None if config is None else _kind_of(config), words


def _kind_of(path: Path) -> str:
    """Return the kind of training whose configuration knows most keys of a file."""
    if not path.is_file():
        return SR.name  # which says so
    from lowtide.training.yaml_loader import read_yaml

    given = [*_paths(read_yaml(path))]

    def unknown(kind: TrainKind) -> int:
        known = {key.path[:end] for key in config_keys(kind.config()) for end in range(1, 9)}
        return sum(one not in known for one in given)

    return min(_KINDS.values(), key=unknown).name


def _paths(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Iterate over the paths of all keys in a configuration's plain values."""
    for name, value in values.items():
        yield (*above, str(name))
        if isinstance(value, dict):
            yield from _paths(value, (*above, str(name)))


@report_errors
@with_settings(TrainSettings, "model batch device all_devices")
def plan_module(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=(
                "package.module:function or path/to/file.py:function, which returns a module;"
                " a network_g.type of `lowtide train sr`; a bundled model; or a model file. Python"
                " files are run. Or a training: its FILE.yml, sr, denoise or forecast and the words"
                " of that training, or ldm4ts; their options: plan train sr --help, ..."
            ),
        ),
    ],
    all_devices: AllDevices = False,
    force: Force = False,
    as_json: JsonReport = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Predict whether training a model fits a GPU's memory, and what would make it fit.

    Nothing is trained and no GPU is needed: the step is traced without data.
    """
    from lowtide.jobs.train import plan as job

    _plan(
        functools.partial(job.plan_training, model),
        functools.partial(job.plan_training_on_all_gpus, model),
        all_devices=all_devices,
        force=force,
        as_json=as_json,
        quiet=quiet,
        **settings,
    )


TRAIN_COMMAND = make_command(plan_module, "train", PlanTrainCommand)


@functools.cache
def _command(name: str) -> Any:
    """Return the command that plans a training."""
    return _ldm4ts_command() if name == _LDM4TS else _run_command(_KINDS[name])


def _run_command(kind: TrainKind) -> Any:
    @report_errors
    @with_settings(TrainPlanSettings, "context words device all_devices")
    def plan_run(
        context: typer.Context,
        words: Words = None,
        all_devices: AllDevices = False,
        force: Force = False,
        as_json: JsonReport = False,
        quiet: Quiet = False,
        **settings: Any,
    ) -> None:
        config, flags = training_config(kind, context, words or []), (as_json, quiet)
        _plan_run(config, kind.task(), *flags, all_devices=all_devices, force=force, **settings)

    plan_run.__doc__ = join_lines(_HELP.format(name=kind.name))
    return make_command(plan_run, kind.name, config_command(kind.config, kind.aliases))


def _ldm4ts_command() -> Any:
    @report_errors
    @with_settings(TrainPlanSettings, "context series device all_devices")
    def plan_ldm4ts(
        context: typer.Context,
        series: Annotated[
            int, option("--series", panel="datasets.train", min=1, help="Series of the table.")
        ] = 1,
        all_devices: AllDevices = False,
        force: Force = False,
        as_json: JsonReport = False,
        quiet: Quiet = False,
        **settings: Any,
    ) -> None:
        """Predict whether a forecaster's training fits the memory, and what would make it fit.

        It is planned as `lowtide train forecast` prepares it, for a table of --series series that
        need not exist; keys are those of that training.
        """
        from lowtide.jobs.forecast.train import make_task_of_any_table

        config, flags = _ldm4ts_config(context), (as_json, quiet)
        make_task = functools.partial(make_task_of_any_table, series=series)
        _plan_run(config, make_task, *flags, all_devices=all_devices, force=force, **settings)

    return make_command(plan_ldm4ts, _LDM4TS, config_command(FORECAST.config, _LDM4TS_ALIASES))


def _ldm4ts_config(context: typer.Context) -> Any:
    table = ("datasets", "train", "table")
    usual: Given = {
        ("name",): ("--name", lambda: _LDM4TS),
        ("horizons",): ("--horizons", lambda: [96]),
        table: ("--table", lambda: f"{_LDM4TS}.csv"),
    }
    config: Any = config_from_options(FORECAST.config(), context, None, usual)
    if str(config.datasets.train.table) != f"{_LDM4TS}.csv":
        raise UsageError(
            "a table has a number of series of its own",
            hint=f"lowtide plan train forecast {config.datasets.train.table}",
        )
    return config


def _plan_run(
    config: RunConfig, make_task: Callable[..., Any], as_json: bool, quiet: bool, **more: Any
) -> None:
    from lowtide.jobs.train import plan as job

    _plan(
        functools.partial(job.plan_run, config, make_task),
        functools.partial(job.plan_run_on_all_gpus, config, make_task),
        as_json=as_json,
        quiet=quiet,
        **more,
    )


def _plan(
    plan: Callable[..., Any],
    plan_on_all: Callable[..., Any],
    *,
    all_devices: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Plan for one device or for all, and print the result."""
    if all_devices and (settings["plot"], settings["device"]) != (None, "auto"):
        raise UsageError(
            "--all-devices contradicts --device and --plot", hint="drop it, or the others"
        )
    with step_printer("tracing", "the step", quiet=quiet) as tell:
        if all_devices:
            del settings["plot"], settings["device"]
            result = plan_on_all(progress=tell, **settings)
        else:
            result = plan(force=force, progress=tell, **settings)
    # The plan is printed even if nothing fits, which is an error.
    print_result(result, lambda: typer.echo(str(result)), result.require, as_json=as_json)
