"""Trained forecasters as folders, and the tables that they can forecast."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import InputError, ModelError, UsageError
from lowtide.core.input_file import exists, is_folder, require_input
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.media.calendar_names import calendar_of
from lowtide.media.table import read_table
from lowtide.media.table_frames import TableData
from lowtide.media.table_options import TableOptions
from lowtide.media.time_table import TimeTable
from lowtide.memory.library_memory import require_room_for_libraries
from lowtide.memory.process_memory import available_host_bytes
from lowtide.models.forecaster.forecaster import RidgeForecaster, load_forecaster, save_forecaster
from lowtide.models.forecaster.paths import AUTO_PATHS, PATHS, ForecastDistribution, PathSampler
from lowtide.models.forecaster.windows import forward_fill

if TYPE_CHECKING:
    from lowtide.models.ldm4ts.model import LDM4TSModel

DIFFUSION = "diffusion"
# Files of a run's folder, beside the best weights.
_FACTS, _FORECASTER = "models/forecast.json", "models/forecaster.npz"
_TRAIN_HINT = "lowtide train forecast DATA --horizons 96 makes one in experiments"


class TrainedForecasterFacts(BaseModel, frozen=True, extra="forbid"):
    """What a trained forecaster is of.

    ``name`` is that of its run, ``until`` the last stamp that it was trained on. ``phases`` are
    those of a season that it has seen.
    """

    schema_version: int = SCHEMA_VERSION
    name: str = Field(pattern=r"^[\w.-]+$")
    columns: tuple[str, ...]
    frequency: str
    season: int
    phases: int
    horizons: tuple[int, ...]
    split: str
    until: str

    @property
    def horizon(self) -> int:
        """The longest of the horizons."""
        return max(self.horizons)


@contextlib.contextmanager
def without_attention_warnings() -> Iterator[None]:
    """Raise no warnings of attention backends inside: reports have them as `LDM4TSModel.notes`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="attention backend ")
        yield


def save_parts(folder: Path, facts: TrainedForecasterFacts, ridge: RidgeForecaster) -> None:
    """Write into a run's ``folder`` what its weights need besides; raises `OutputError`."""
    save_forecaster(folder / _FORECASTER, ridge)
    with atomic_output(folder / _FACTS) as part:
        part.write_text(facts.model_dump_json(indent=1) + "\n")


@dataclass(frozen=True)
class TrainedForecaster:
    """Forecaster of a folder: the mean and scale in closed form, and a denoiser of its paths.

    Attributes:
        folder: The folder of its run.
        facts: What it is of.
        ridge: The forecaster in closed form.
        denoiser: The denoiser of residual paths, with the best weights.
    """

    folder: Path
    facts: TrainedForecasterFacts
    ridge: RidgeForecaster
    denoiser: LDM4TSModel

    @classmethod
    def load(cls, folder: Path) -> TrainedForecaster:
        """Read a run's folder.

        Raises:
            UsageError: It is not the folder of a forecaster's training.
            ModelError: A file is missing or damaged.
        """
        require_room_for_libraries("lowtide.models.ldm4ts.model")
        from lowtide.models.ldm4ts.model import LDM4TSModel

        if not exists(folder / _FACTS):
            what = "has no trained forecaster" if is_folder(folder) else "is no folder"
            raise UsageError(f"{folder} {what}", hint=_TRAIN_HINT)
        facts = _read_facts(folder / _FACTS)
        best = folder / "models" / f"{facts.name}_best.safetensors"
        if not exists(best):
            raise ModelError(f"{best} is missing", hint="resume the training: the same command")
        found = cls(folder, facts, load_forecaster(folder / _FORECASTER), LDM4TSModel.load(best))
        found._require_one_run()
        return found

    def _require_one_run(self) -> None:
        """Refuse parts of different runs."""
        sizes = self.denoiser.config
        wanted = self.facts.horizon, len(self.facts.columns)
        for shape in (self.ridge.residuals.shape[1:], (sizes.horizon, sizes.variables)):
            if shape != wanted:
                raise ModelError(
                    f"{self.folder} has files of different runs: {wanted[0]:,} steps of {wanted[1]}"
                    f" series, and {shape[0]:,} of {shape[1]}",
                    hint="train it again: lowtide train forecast",
                )

    @property
    def context(self) -> int:
        """Steps before an origin that a forecast needs."""
        return max(self.ridge.context, self.denoiser.config.look_back)

    def read_table(self, data: TableData, options: TableOptions) -> TimeTable:
        """Read the trained series of a table; raises as `require_table` and `media.read_table`."""
        if options.columns and set(options.columns) != set(self.facts.columns):
            raise UsageError(
                f"{self.folder} was trained on the series {', '.join(self.facts.columns)}, not on"
                f" {', '.join(options.columns)}",
                hint="drop --columns; --target forecasts one of them",
            )
        options = replace(options, columns=self.facts.columns)
        table = read_table(data, options, room=available_host_bytes())
        self.require_table(table)
        return table

    def require_table(self, table: TimeTable) -> None:
        """Refuse a table of other series or another frequency, or one that is too short.

        Raises:
            InputError: The table cannot be forecast by this model.
        """
        lost = [name for name in self.facts.columns if name not in table.names]
        if lost:
            raise InputError(
                f"without a single value: {', '.join(lost)}, which {self.folder} was trained on",
                hint="train on the series that there are",
            )
        if not _same_distance(table.grid.frequency, self.facts.frequency):
            raise InputError(
                f"the table's steps are {table.grid.frequency}, and {self.folder} was trained on"
                f" {self.facts.frequency}",
                hint="resample the table, or train on it",
            )
        if len(table.values) < self.context:
            raise InputError(
                f"{len(table.values):,} steps are less than the {self.context:,} that"
                f" {self.folder} looks back at",
                hint="give a longer history",
            )

    def require_horizon(self, steps: int) -> None:
        """Refuse a horizon that is longer than the trained one; raises `UsageError`."""
        if steps > self.facts.horizon:
            raise UsageError(
                f"{self.folder} was trained for {self.facts.horizon:,} steps ahead, not {steps:,}",
                hint=f"--horizon {self.facts.horizon}, or train it for more",
            )

    def require_unseen(self, table: TimeTable, first: int) -> None:
        """Refuse to score a table from step ``first`` on if that was trained on or comes too soon.

        Raises:
            UsageError: Step ``first`` is not after the training.
            InputError: The steps before it are too few for a forecast.
        """
        stamp, until = table.grid.label(first), self.facts.until
        seen = int(stamp) <= int(until) if stamp.isdecimal() else stamp <= until
        if seen:
            raise UsageError(
                f"the part to score begins at {stamp}, and {self.folder} was trained on data until"
                f" {self.facts.until}",
                hint="train it with --split 70/10/20, or give data that go on after that",
            )
        if first < self.context:
            raise InputError(
                f"{first:,} steps before the part to score are less than the {self.context:,} that"
                f" {self.folder} looks back at",
                hint="give a longer history",
            )

    def predict(
        self, values: np.ndarray, origins: np.ndarray, phases: np.ndarray
    ) -> ForecastDistribution:
        """Return distributions of the first h steps, as `RidgeForecaster.predict`.

        Args:
            values: Series [T, D] in its own units.
            origins: Forecast origins [n], ascending, each at least `context`.
            phases: Phase [n, h] of each target in its season.
        """
        steps, most = phases.shape[1], self.ridge.horizon
        if int(phases.max()) >= self.facts.phases:
            raise InputError(
                f"{self.folder} was trained on {self.facts.phases:,} steps of a season alone, and"
                " others are to be forecast",
                hint="train it on a longer history",
            )
        # Steps after the wanted ones are not looked at: any phase does.
        padded = np.pad(phases, ((0, 0), (0, most - steps)), mode="edge")
        made = self.ridge.predict(values, origins, padded)
        return ForecastDistribution(made.origins, made.mean[:, :steps], made.scale[:, :steps])

    def path_name(self, name: str) -> str:
        """Return the name of the sampler that ``name`` means: ``"auto"`` is diffusion."""
        return DIFFUSION if name == AUTO_PATHS else name

    def sampler(
        self, name: str, table: TimeTable, steps: int, sampling_steps: int | None = None
    ) -> PathSampler:
        """Return a sampler of paths of ``steps`` for windows of a table, by its name.

        ``sampling_steps`` are at most taken for diffusion, by default as many as it was made for.
        """
        if name != DIFFUSION:
            return PATHS[name](np.ascontiguousarray(self.ridge.residuals[:, :steps]))
        from lowtide.models.ldm4ts.diffusion_paths import DiffusionPathSampler

        usual = self.denoiser.config.sampling_steps
        taken = usual if sampling_steps is None else min(sampling_steps, usual)
        return DiffusionPathSampler(self.denoiser, standardized_values(self.ridge, table), taken)


def standardized_values(ridge: RidgeForecaster, table: TimeTable) -> np.ndarray:
    """Return a table's values [T, D] in the units of ``ridge``, without NaN, float32."""
    return forward_fill(ridge.scaler.transform(table.values)).astype(np.float32)


def _read_facts(path: Path) -> TrainedForecasterFacts:
    require_input(path, ModelError)
    try:
        return TrainedForecasterFacts.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"{path} is damaged, or of another version: {str(error).splitlines()[0]}",
            hint="resume the training: the same command",
        ) from error


def _same_distance(one: str, other: str) -> bool:
    """Return whether two names are of one distance, as ``h`` and ``60min`` are."""
    return calendar_of(one).name == calendar_of(other).name
