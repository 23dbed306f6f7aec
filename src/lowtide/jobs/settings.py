"""Settings that every job has, validated; imports nothing heavy, so that help is quick."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from lowtide.core.errors import UsageError
from lowtide.core.option import Option
from lowtide.core.precision import Precision
from lowtide.memory.budget import Budget

S = TypeVar("S")

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


def validate_settings(settings: Callable[..., S], values: dict[str, Any]) -> S:
    """Return ``settings(**values)``, or raise `UsageError` that names the invalid option."""
    from pydantic import ValidationError

    try:
        return type_adapter(settings).validate_python(values)
    except ValidationError as error:
        problem, *more = error.errors()
    name = str(problem["loc"][0])
    option, known = "--" + name.replace("_", "-"), settings_fields(settings)
    if name not in known:
        raise UsageError(f"there is no setting {name!r}", hint=f"one of {', '.join(known)}")
    given, words = problem["input"], _PROBLEMS.get(problem["type"])
    shown = f"{given:g}" if isinstance(given, float) else given
    # A union of "auto" and other types reports one error for each member.
    both = [one.get("ctx", {}).get("expected") for one in (problem, *more)]
    details = {
        **problem.get("ctx", {}),
        "expected": ", ".join(filter(None, both)).replace(" or ", ", "),
    }
    trouble = words.format(**details) if words else problem["msg"].lower()
    field, described, _ = known[name]
    usual = field.default if described.example is None else described.example
    raise UsageError(
        f"{option} {shown} {trouble}", hint=f"{option} {usual}" if usual not in (None, ()) else None
    )


@functools.cache
def type_adapter(settings: Any) -> Any:
    """Return pydantic's adapter of a settings class, which validates and dumps it."""
    from pydantic import TypeAdapter

    return TypeAdapter(settings)


@functools.cache
def settings_fields(settings: Any) -> dict[str, tuple[Field[Any], Option, Any]]:
    """Return the fields of a settings class by name, each with its `Option` and its type."""
    hints = get_type_hints(settings, include_extras=True)
    return {
        one.name: (one, *_described(hints[one.name]))  # pyright: ignore[reportReturnType]
        for one in fields(settings)
    }


def _described(hint: Any) -> tuple[Option, Any]:
    """Return the `Option` in the annotation of a field, and the type."""
    (option,) = (one for one in hint.__metadata__ if isinstance(one, Option))
    return option, hint.__origin__


@dataclass(frozen=True, kw_only=True)
class RunSettings:
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

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    budget: Annotated[
        str | int | Budget,
        Option(
            "Memory for the run on the device: 6GiB, 80% of what is free, or auto.",
            flags=("-b", "--budget"),
        ),
    ] = "auto"
    host_budget: Annotated[
        str | int | None,
        Option("Host memory for a run on a GPU. Default: 60% of what is free."),
    ] = None
    disk_budget: Annotated[
        str | int | None, Option("Disk for scratch files. Default: 90% of what is free.")
    ] = None
    scratch: Annotated[
        Path | None, Option("Folder for scratch files. Default: the output folder.", "Files")
    ] = None
    device: Annotated[str, Option("auto, cpu, cuda:0, ...")] = "auto"
    devices: Annotated[
        tuple[str, ...],
        Option(
            "Images of a folder, or the tiles of one image, over several devices:"
            " cuda:0,cuda:1, or cpu,cpu for two workers on the CPU that share its threads and"
            " the budget.",
            metavar="LIST",
        ),
    ] = ()
    precision: Annotated[
        Literal["auto"] | Precision,
        Option(
            "auto is fp32 on the CPU and bf16 or fp16 on GPUs that gain from it. int8 computes"
            " linear layers in 8 bits, with torchao; fp8 does so on GPUs of compute capability"
            " 8.9 or higher, with everything else in bf16.",
            "Overriding the plan",
        ),
    ] = "auto"
    accuracy: Annotated[
        Literal["exact", "bounded", "fast"] | None,
        Option(
            "exact: equal to the unconstrained run, or refused. bounded: tiles where nothing"
            " exact fits, and their error is measured. fast: whatever takes least time."
            " Default: exact, or bounded where tiles are requested."
        ),
    ] = None
    plan_file: Annotated[
        Path | None,
        Option(
            "Replay a plan from `lowtide plan upscale --json`, or from a report.",
            flags=("--plan",),
            metavar="FILE",
        ),
    ] = None

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; raises `UsageError` for invalid ones.

        ``devices`` may be text such as ``"cuda:0,cuda:1"``.
        """
        devices = values.get("devices") or ()
        if isinstance(devices, str):
            devices = tuple(name.strip() for name in devices.split(",") if name.strip())
        settings = validate_settings(cls, {**values, "devices": devices})
        settings.check()
        return settings

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Build settings from what `to_json` returned."""
        return validate_settings(cls, values)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return type_adapter(type(self)).dump_python(self, mode="json")

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
