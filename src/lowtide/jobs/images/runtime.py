"""What a job needs of the runtime that computes its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lowtide.jobs.engine.devices import resolve_devices
from lowtide.jobs.engine.report import versions_used
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.jobs.images.settings import ImageSettings


def devices_of(settings: ImageSettings) -> list[str]:
    """Return the devices to run on; raises `UsageError` for those that are not here."""
    if settings.computed_by == "torch":
        return resolve_devices(settings.device_names)
    return ["cpu"] * len(settings.device_names)


def runtime_versions(settings: ImageSettings, packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of all that determines a result's values."""
    return versions_used(settings.model_name, packages, settings.computed_by)


def import_job_libraries(settings: ImageSettings) -> None:
    """Import the libraries that the job needs, before a meter takes its baseline."""
    if settings.computed_by == "torch":
        from lowtide.jobs.images.prepare import import_job_libraries

        import_job_libraries(settings)
    else:
        import ncnn  # noqa: F401
        import pyvips  # noqa: F401


def load_prepared_model(settings: ImageSettings, **more: Any) -> PreparedModel:
    """Load the model and get its costs; arguments are those of `prepare.load_prepared_model`."""
    if settings.computed_by == "torch":
        from lowtide.jobs.images.prepare import load_prepared_model

        return load_prepared_model(settings, **more)
    from lowtide.jobs.images.host_model import load_host_model

    return load_host_model(settings, **{name: more[name] for name in _KNOWN if name in more})


# What a runtime without measurements of its own has a use for.
_KNOWN = "progress", "on_loaded"
