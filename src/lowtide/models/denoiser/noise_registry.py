"""Noise models by name: the built-in ones, and those of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from lowtide.core.errors import ModelError, UsageError, hint_for_name
from lowtide.models.denoiser.noise_models import (
    GaussianNoise,
    NoiseModel,
    PoissonGaussianNoise,
    RicianNoise,
)
from lowtide.models.denoiser.raw_camera_noise import RawCameraNoise

GROUP = "lowtide.noise_models"
_BUILT_IN: dict[str, type[NoiseModel]] = {
    one.name: one for one in (GaussianNoise, PoissonGaussianNoise, RawCameraNoise, RicianNoise)
}


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
