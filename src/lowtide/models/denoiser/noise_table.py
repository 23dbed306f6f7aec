"""Noise models by name, also of other packages, and files of a camera's noise at several ISOs."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import InputError, ModelError, UsageError, hint_for_name
from lowtide.core.input_file import require_input
from lowtide.models.denoiser.noise_models import (
    GaussianNoise,
    NoiseModel,
    NotNegative,
    PoissonGaussianNoise,
    RicianNoise,
)
from lowtide.models.denoiser.raw_camera_noise import RawCameraNoise

Iso = Annotated[int, Field(gt=0)]

GROUP = "lowtide.noise_models"
_BUILT_IN: dict[str, type[NoiseModel]] = {
    one.name: one for one in (GaussianNoise, PoissonGaussianNoise, RawCameraNoise, RicianNoise)
}


class NoiseSetting(BaseModel):
    """Parameters of a noise model at one ISO, None where there is no ISO."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    iso: Iso | None
    parameters: dict[str, float | None]
    standard_errors: dict[str, NotNegative] = {}


class NoiseTable(BaseModel):
    """Noise of one camera: a model's name and its parameters at one or more ISOs.

    Attributes:
        camera: What it was calibrated for.
        noise_model: Name of the noise model.
        settings: In the order of their ISOs; one without ISO stands alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal["lowtide-noise"] = "lowtide-noise"
    schema_version: Literal[1] = 1
    camera: str
    noise_model: str
    settings: Annotated[tuple[NoiseSetting, ...], Field(min_length=1)]

    @property
    def sha256(self) -> str:
        """Hash of the content, however the file is laid out."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def iso_range(self) -> tuple[int, int] | None:
        """Lowest and highest ISO, None without ISO."""
        isos = self._isos
        return (isos[0], isos[-1]) if isos else None

    @property
    def _isos(self) -> list[int]:
        return [one.iso for one in self.settings if one.iso is not None]

    def check(self) -> None:
        """Raise `UsageError` for settings out of order, or that the model does not take."""
        isos = self._isos
        if len(isos) < len(self.settings) and len(self.settings) > 1:
            raise UsageError("a setting without ISO has to be the only one")
        if isos != sorted(set(isos)):
            raise UsageError(f"ISOs have to ascend, not {', '.join(map(str, isos))}")
        for one in self.settings:
            build_noise(self.noise_model, one.parameters)

    def at(self, iso: int | None = None) -> NoiseModel:
        """Return the noise at an ISO.

        Between ISOs of the table the logarithms of the model's ``log_fields`` are linear in that of
        the ISO; other parameters are those of the nearest. A table without ISO is for all.

        Raises:
            UsageError: There is no ISO and the table has several, or the ISO is outside of it.
        """
        isos = self._isos
        if not isos or (iso is None and len(isos) == 1):
            return build_noise(self.noise_model, self.settings[0].parameters)
        if iso is None or not isos[0] <= iso <= isos[-1]:
            given = "no ISO is given" if iso is None else f"ISO {iso} is outside"
            raise UsageError(
                f"{given}, and the noise of {self.camera} is known from ISO {isos[0]}"
                f" to {isos[-1]}",
                hint=f"give an ISO from {isos[0]} to {isos[-1]}, or calibrate more",
            )
        above = bisect_left(isos, iso)
        if isos[above] == iso:
            return build_noise(self.noise_model, self.settings[above].parameters)
        return self._between(self.settings[above - 1], self.settings[above], iso)

    def _between(self, low: NoiseSetting, high: NoiseSetting, iso: int) -> NoiseModel:
        low_model, high_model = (
            build_noise(self.noise_model, one.parameters) for one in (low, high)
        )
        assert low.iso is not None and high.iso is not None
        weight = math.log(iso / low.iso) / math.log(high.iso / low.iso)
        parameters: dict[str, Any] = (high_model if weight > 0.5 else low_model).model_dump()
        for name in low_model.log_fields:
            first, second = getattr(low_model, name), getattr(high_model, name)
            if first > 0 and second > 0:
                parameters[name] = first ** (1 - weight) * second**weight
            else:  # one is 0, and has no logarithm
                parameters[name] = first * (1 - weight) + second * weight
        return build_noise(self.noise_model, parameters)

    def save(self, path: Path | str, *, replace: bool = True) -> None:
        """Write the table as JSON; raises `OutputError` where that fails."""
        with atomic_output(Path(path), replace=replace) as part:
            part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_noise(path: Path | str) -> NoiseTable:
    """Read the noise table that `lowtide train noise` wrote.

    Raises:
        InputError: The file cannot be read, is no such table, or needs a model that is not
            installed.
    """
    path = Path(path)
    hint = "lowtide train noise writes such files"
    require_input(path, hint=hint)
    try:
        table = NoiseTable.model_validate_json(path.read_bytes())
        table.check()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise InputError(f"{path}: no noise table: {message}", hint=hint) from error
    except UsageError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint or hint) from error
    return table


def noise_model_names() -> list[str]:
    """Return the names of all noise models: built in, then by entry point."""
    return [*_BUILT_IN, *sorted({one.name for one in entry_points(group=GROUP)} - set(_BUILT_IN))]


def noise_model_class(name: str) -> type[NoiseModel]:
    """Return the noise model of a name.

    Raises:
        UsageError: There is none of that name.
        ModelError: A package's model cannot be used, or two packages claim its name.
    """
    found = list(entry_points(group=GROUP, name=name))
    if name in _BUILT_IN:
        if found:
            raise ModelError(
                f"{_place(found[0])} has the name of a built-in noise model, {name}",
                hint="rename it, or remove that package",
            )
        return _BUILT_IN[name]
    if not found:
        raise UsageError(
            f"there is no noise model {name!r}", hint=hint_for_name(name, noise_model_names())
        )
    if len(found) > 1:
        raise ModelError(
            f"the noise model {name} is in {' and in '.join(map(_place, found))}",
            hint="remove one of these packages",
        )
    return _loaded(found[0])


def _loaded(entry: EntryPoint) -> type[NoiseModel]:
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{_place(entry)} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, NoiseModel)):
        raise ModelError(f"{_place(entry)} is not a subclass of {NoiseModel.__module__}.NoiseModel")
    if getattr(found, "name", None) != entry.name:
        raise ModelError(
            f"{_place(entry)} calls itself {getattr(found, 'name', None)!r}, and its entry point"
            f" {entry.name!r}"
        )
    return found


def _place(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    return f"{entry.value}{package}"


def build_noise(name: str, parameters: Mapping[str, Any]) -> NoiseModel:
    """Return the noise model of a name with its parameters.

    Raises `UsageError` for an unknown name, and for parameters that it does not take.
    """
    kind = noise_model_class(name)
    try:
        return kind.model_validate(dict(parameters))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "parameters"
        raise UsageError(
            f"noise model {name}: {where}: {first['msg']}",
            hint=f"its parameters are {', '.join(kind.model_fields)}",
        ) from error
