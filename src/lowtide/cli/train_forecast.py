"""Command `lowtide train forecast`: train a forecaster within a budget."""

from __future__ import annotations

from typing import Any

from lowtide.cli.train import TrainKind, train_command

EXAMPLE = """\
# A forecaster of a table of series, as lowtide forecast and lowtide backtest take it.
name: load-96
horizons: [96]             # the longest covers all
manual_seed: 0
precision: fp32            # fp32, bf16, fp16 (GPU)
datasets:
  train:
    table: load.csv
    # columns: [load, price]
    split: 70/10/20        # trains on the first part; ett, or all rows
    batch_size_per_gpu: 64
network:
  image_size: [64, 64]
  look_back: 336
train:
  total_iter: 300
  optim: {type: adamw, lr: 5.0e-4}
  scheduler: {type: cosine}
  ema_decay: 0.999
val:
  val_freq: 100
logger:
  print_freq: 50
  save_checkpoint_freq: 100
"""


def _config() -> type[Any]:
    from lowtide.training.tasks.forecast_config import ForecastConfig

    return ForecastConfig


def _job() -> Any:
    from lowtide.jobs.forecast.train import train_forecast

    return train_forecast


def _task() -> Any:
    from lowtide.jobs.forecast.train import make_forecast_task

    return make_forecast_task


FORECAST = TrainKind(
    "forecast",
    help="""Train a forecaster of a table within a memory budget, or resume a run.

    DATA is a CSV or Parquet file, the same as --table. Every key of the configuration is also an
    option, which overrides the file. Without one the options are enough: lowtide train forecast
    load.csv --horizons 96,192.

    Mean and scale are fitted in closed form, as `lowtide forecast` does it; trained is the
    diffusion of what is left. It takes all of --total-iter steps: nothing stops it early. The
    weights that are best on the last windows of the training part are kept in addition to the last
    ones, and used. The run's folder is a model: lowtide forecast load.csv -m
    experiments/load-forecast, lowtide backtest load.csv -m experiments/load-forecast.

    The memory of a step is predicted before the first one. Ctrl-C saves the state of the step; the
    same command resumes from there, with the losses of a run that was never stopped.
    """,
    example=lambda: EXAMPLE,
    config=_config,
    job=_job,
    task=_task,
    data=("datasets", "train", "table"),
    data_is_file=True,
)
FORECAST_COMMAND = train_command(FORECAST)
