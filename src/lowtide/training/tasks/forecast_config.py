"""Configuration of a forecaster's training: residual paths drawn by latent diffusion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from lowtide.models.ldm4ts.config import Backend
from lowtide.training.run_config import (
    ConfigSection,
    DatasetsSection,
    OptimSection,
    RunConfig,
    TrainDataSection,
    TrainSection,
    ValSection,
)


def _split_words(value: Any) -> Any:
    """Accept ``a,b`` or a single value for a list, as options of the command line are given."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return [value] if isinstance(value, int | float) else value


def _both_sides(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


def _words_of(value: Any) -> Any:
    found = _split_words(value)
    return [str(one) for one in found] if isinstance(found, list) else found


# Steps after which there is a first validation, if those of `val_freq` come later.
_EARLY = 2, 5, 10, 20, 50

Count = Annotated[int, Field(ge=1)]
Side = Annotated[int, Field(ge=16, multiple_of=8)]
Counts = Annotated[list[Count], Field(min_length=1), BeforeValidator(_split_words)]
Sides = Annotated[tuple[Side, Side], BeforeValidator(_both_sides)]
Words = Annotated[list[str], BeforeValidator(_words_of)]


class TableDataSection(TrainDataSection, frozen=True):
    """Section ``datasets.train``: the table, the part of it to train on, and the batch."""

    batch_size_per_gpu: int = Field(
        default=64, ge=1, description="Windows in a step on each device."
    )
    table: Path = Field(description="CSV or Parquet file of the series, as lowtide forecast's.")
    columns: Words = Field(default=[], description="Series to use; all by default.")
    frequency: str | None = Field(
        default=None, description="Distance of rows: h, 15min, D, W, MS, ... Default: found."
    )
    season: str | int | None = Field(
        default=None, description="Steps of a season, or none. Default: that of the distance."
    )
    time_column: str | None = Field(default=None, description="Column of dates. Default: found.")
    id_column: str | None = Field(
        default=None, description="Column of a long table's names of series. Default: found."
    )
    target: str | None = Field(
        default=None, description="Column of a long table's values. Default: found."
    )
    known: Words = Field(
        default=[], description="Columns that are known ahead of the last value. Default: found."
    )
    date_format: str | None = Field(
        default=None, description="How dates are written: %d.%m.%Y, excel, ms, ... Default: found."
    )
    day_first: bool | None = Field(
        default=None, description="Whether days stand before months. Default: found."
    )
    decimal: Literal[".", ","] | None = Field(
        default=None, description="What separates decimals: . or , Default: found."
    )
    timezone: str | None = Field(
        default=None, description="Zone of the stamps: Europe/Berlin. Default: found."
    )
    consecutive: bool = Field(
        default=False, description="Count rows, whatever the distance of their stamps."
    )
    split: Literal["70/10/20", "ett", "all"] = Field(
        default="70/10/20",
        description=(
            "What is trained on: the first part of a split, whose last part lowtide backtest"
            " scores, or all rows."
        ),
    )
    validation_share: float = Field(
        default=0.2,
        gt=0,
        le=0.5,
        description="Share of windows, the last of the part, that choose the best weights only.",
    )


class ForecastDatasetsSection(DatasetsSection, frozen=True):
    """Section ``datasets``."""

    train: TableDataSection


class DiffusionNetworkSection(ConfigSection, frozen=True):
    """Section ``network``: fields of `LDM4TSConfig` that a training does not know itself."""

    image_size: Sides = Field(
        default=(64, 64), description="Sides of the paths' images, multiples of 8."
    )
    look_back: int = Field(default=336, ge=2, description="Steps before the forecast that it sees.")
    period: int | None = Field(
        default=None, ge=1, description="Steps of a row of the images. Default: a season."
    )
    latent_channels: int = Field(default=4, ge=1, description="Channels of the latent.")
    width: int = Field(default=32, ge=8, description="Channels of the U-Net's first level.")
    autoencoder: Path | None = Field(
        default=None,
        description=(
            "Folder of a diffusers AutoencoderKL, which forecasts need too. Default: closed form."
        ),
    )
    views: bool = Field(default=True, description="See the look-back as images.")
    spectrum: bool = Field(default=True, description="See the look-back's frequencies.")
    temporal: bool = Field(default=True, description="See the look-back as a series.")
    diffusion_steps: int = Field(
        default=1000, ge=2, description="Noise levels trained on. Fewer save no memory."
    )
    sampling_steps: int = Field(default=10, ge=1, description="Steps of the sampler.")
    attention_backend: Backend = Field(
        default="default", description="Attention of the U-Net, where it is installed."
    )
    attention_tokens: int = Field(
        default=64,
        ge=0,
        le=784,
        description="Pixels that a level of the U-Net has at most to attend to itself.",
    )


class ForecastTrainSection(TrainSection, frozen=True):
    """Section ``train``: length, optimizer, schedule and EMA."""

    total_iter: int = Field(
        default=300, ge=1, description="Steps of the training, if it goes on gaining."
    )
    optim: OptimSection = OptimSection(lr=5e-4)


class ForecastValSection(ValSection, frozen=True):
    """Section ``val``: how often the best weights are chosen anew.

    There are validations after 2, 5, 10, 20 and 50 steps too: of a short table all windows are soon
    known by heart.
    """

    val_freq: int = Field(default=100, ge=1, description="Steps between later validations.")
    patience: int | None = Field(
        default=4,
        ge=1,
        description="Validations without a better score after which the training stops.",
    )

    def is_due(self, step: int) -> bool:
        """Whether there is a validation after this step."""
        return super().is_due(step) or (step < self.val_freq and step in _EARLY)


class ForecastConfig(RunConfig, frozen=True):
    """Configuration of a forecaster's training."""

    horizons: Counts = Field(description="Steps to forecast: 96,192. The longest covers all.")
    datasets: ForecastDatasetsSection
    network: DiffusionNetworkSection = DiffusionNetworkSection()
    train: ForecastTrainSection = ForecastTrainSection()
    val: ForecastValSection = ForecastValSection()

    @field_validator("name")
    @classmethod
    def _reject_other_file(cls, name: str) -> str:
        """Reject the name under which sizes of the network would overwrite the configuration."""
        if name.lower() == "config":
            raise ValueError("config.json is the configuration's file: choose another name")
        return name

    @property
    def horizon(self) -> int:
        """The longest of the horizons, of which the others are the first steps."""
        return max(self.horizons)
