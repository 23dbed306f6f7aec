"""Fitted forecasters as files of arrays (.npz)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from lowtide.core.atomic_file import atomic_output, make_folder
from lowtide.core.errors import ModelError
from lowtide.core.input_file import require_input
from lowtide.models.forecaster.forecaster import RidgeForecaster
from lowtide.models.forecaster.paths import PATHS, PathChoice, Scaler
from lowtide.models.forecaster.scale import ConditionalScale

_SCALE = ("table", "center", "low", "high", "slopes")
_WHOLE = ("horizon", "recent", "block")


def save_forecaster(path: Path, model: RidgeForecaster) -> None:
    """Write all arrays of a forecaster; raises `OutputError`."""
    arrays: dict[str, np.ndarray] = {
        "mean": model.scaler.mean,
        "deviation": model.scaler.deviation,
        "penalties": np.array(model.penalties),
        "residuals": model.residuals,
        "origins": model.origins,
        "unverified": model.unverified,
        "paths": np.array(model.paths.name),
        "energy_names": np.array(list(model.paths.energy), "U"),
        "energy": np.array(list(model.paths.energy.values()), float),
    }
    arrays |= {name: np.array(getattr(model, name)) for name in _WHOLE}
    arrays |= {f"scale_{name}": getattr(model.scale, name) for name in _SCALE}
    arrays |= {f"ridge_{number}": matrix for number, matrix in enumerate(model.ridges)}
    make_folder(path.parent)
    with atomic_output(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def load_forecaster(path: Path) -> RidgeForecaster:
    """Read a forecaster; raises `ModelError` for a file that is damaged or of another kind."""
    require_input(path, ModelError, hint="train it again: lowtide train forecast")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _forecaster(arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{path} is no file of a forecaster, or is damaged: {error}",
            hint="train it again: lowtide train forecast",
        ) from error


def _forecaster(arrays: dict[str, np.ndarray]) -> RidgeForecaster:
    name, residuals = str(arrays["paths"]), arrays["residuals"]
    energy = dict(zip(arrays["energy_names"].tolist(), arrays["energy"].tolist(), strict=True))
    horizon, recent, block = (int(arrays[one]) for one in _WHOLE)
    penalties = tuple(arrays["penalties"].tolist())
    return RidgeForecaster(
        horizon=horizon,
        scaler=Scaler(arrays["mean"], arrays["deviation"]),
        ridges=tuple(arrays[f"ridge_{number}"] for number in range(len(penalties))),
        penalties=penalties,
        scale=ConditionalScale(*(arrays[f"scale_{one}"] for one in _SCALE)),
        residuals=residuals,
        origins=arrays["origins"],
        paths=PathChoice(name, PATHS[name](residuals), energy),
        recent=recent,
        block=block,
        unverified=arrays["unverified"],
    )
