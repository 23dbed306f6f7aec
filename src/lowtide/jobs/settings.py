"""Settings that every job has, validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from lowtide.core.errors import UsageError
from lowtide.core.precision import Precision
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest

M = TypeVar("M", bound=BaseModel)

_PROBLEMS = {
    "greater_than": "has to be above {gt:g}",
    "greater_than_equal": "has to be at least {ge:g}",
    "less_than_equal": "has to be at most {le:g}",
    "literal_error": "is not one of {expected}",
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_type": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
}


def validate_settings(model_class: type[M], values: dict[str, Any]) -> M:
    """Return ``kind(**values)``, or raise `UsageError` that names the invalid option."""
    try:
        return model_class(**values)
    except ValidationError as error:
        problem, *more = error.errors()
    name = str(problem["loc"][0])
    option, field = "--" + name.replace("_", "-"), model_class.model_fields.get(name)
    if field is None:
        raise UsageError(
            f"there is no setting {name!r}", hint=f"one of {', '.join(model_class.model_fields)}"
        )
    given, words = problem["input"], _PROBLEMS.get(problem["type"])
    shown = f"{given:g}" if isinstance(given, float) else given
    # A union of "auto" and other types reports one error for each member.
    both = [one.get("ctx", {}).get("expected") for one in (problem, *more)]
    details = {
        **problem.get("ctx", {}),
        "expected": ", ".join(filter(None, both)).replace(" or ", ", "),
    }
    trouble = words.format(**details) if words else problem["msg"].lower()
    usual = field.examples[0] if field.examples else field.default
    raise UsageError(
        f"{option} {shown} {trouble}", hint=f"{option} {usual}" if usual not in (None, ()) else None
    )


class RunSettings(BaseModel):
    """Settings of any job that runs a model within a budget.

    Attributes:
        budget: ``"6GiB"``, ``"80%"`` of what is free, ``"auto"``, bytes, or a `Budget`.
        host_budget: Host memory for a run on a GPU, in the same forms.
        disk_budget: Disk for scratch files, in the same forms.
        scratch: Folder for scratch files; by default that of the results.
        device: ``"auto"``, ``"cpu"``, ``"cuda:0"``, ...
        devices: Several devices, between which items or tiles are divided.
        precision: What most layers compute in.
        accuracy: What the result may differ from that of the unconstrained run.
        plan_file: Plans to replay.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    budget: str | int | Budget = "auto"
    host_budget: str | int | None = None
    disk_budget: str | int | None = None
    scratch: Path | None = None
    device: str = "auto"
    devices: tuple[str, ...] = ()
    precision: Literal["auto"] | Precision = "auto"
    accuracy: AccuracyRequest | None = None
    plan_file: Path | None = None

    @field_validator("devices", mode="before")
    @classmethod
    def _split_devices(cls, given: Any) -> Any:
        """Split ``"cuda:0,cuda:1"`` into a list."""
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(",") if name.strip())
        return given or ()

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; raises `UsageError` for invalid ones."""
        settings = validate_settings(cls, values)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        if self.devices and self.device != "auto":
            raise UsageError("--device and --devices contradict each other", hint="drop one")

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices to run on, as they were named."""
        return self.devices or (self.device,)

    def parse_budget(self, device: str, scratch: Path) -> Budget:
        """Return the `Budget` on one device, with scratch files in a folder."""
        return Budget.parse(
            self.budget,
            device=device,
            host=self.host_budget,
            disk=self.disk_budget,
            scratch=scratch,
        )
