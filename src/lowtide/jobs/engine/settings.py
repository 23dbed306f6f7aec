"""Settings that every job has, validated; imports nothing heavy, so that help is quick."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from lowtide.core.errors import UsageError
from lowtide.core.option import Option, Precision
from lowtide.memory.budget import Budget

S = TypeVar("S")

# An attribute in a docstring: its name, and its text with the lines that go on deeper.
_ATTRIBUTE = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)
_PRECISION_HINT = (
    "--precision auto; 8 bits are for exported files:"
    " lowtide export onnx MODEL -o FILE --precision int8 --calibrate PHOTOS"
)
_PROBLEMS = {
    "greater_than": "has to be above {gt:g}",
    "greater_than_equal": "has to be at least {ge:g}",
    "less_than_equal": "has to be at most {le:,}",
    "finite_number": "has to be a finite number",
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
    field = known[name]
    usual = field.default if field.option.example is None else field.option.example
    example = f"{option} {usual}" if usual not in (None, ()) else None
    raise UsageError(f"{option} {shown} {trouble}", hint=field.option.hint or example)


@functools.cache
def type_adapter(settings: Any) -> Any:
    """Return pydantic's adapter of a settings class, which validates and dumps it."""
    from pydantic import TypeAdapter

    return TypeAdapter(settings)


@dataclass(frozen=True)
class SettingsField:
    """Field of a settings class: type, default, help from the docstring, and `Option`."""

    type: Any
    default: Any
    help: str
    option: Option


@functools.cache
def settings_fields(settings: Any) -> dict[str, SettingsField]:
    """Return the fields of a settings class by name; a base's texts are overridden."""
    types = get_type_hints(settings, include_extras=True)
    helps = {
        name: " ".join(text.split())
        for one in reversed(settings.__mro__)
        for name, text in _ATTRIBUTE.findall((one.__doc__ or "").partition("Attributes:")[2])
    }
    found = {}
    for field in fields(settings):
        extras = getattr(types[field.name], "__metadata__", ())
        option = next((one for one in extras if isinstance(one, Option)), Option())
        kind = types[field.name].__origin__ if extras else types[field.name]
        help = helps.get(field.name, "")
        found[field.name] = SettingsField(kind, field.default, help, option)
    return found


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of any job that runs a model within a budget.

    A budget is ``"6GiB"``, ``"80%"`` of what is free, ``"auto"``, bytes, or a `Budget`. Texts of
    attributes are the help of a command's options.

    Attributes:
        budget: Memory for the run on the device: 6GiB, 80% of what is free, or auto.
        host_budget: Host memory for a run on a GPU. Default: 60% of what is free.
        disk_budget: Disk for scratch files. Default: 90% of what is free.
        scratch: Folder for scratch files. Default: the output folder.
        device: auto, cpu, cuda:0, ...
        devices: Images of a folder, or the tiles of one image, over several devices: cuda:0,cuda:1,
            or cpu,cpu for two workers on the CPU that share its threads and the budget.
        precision: auto is fp32 on the CPU and bf16 or fp16 on GPUs that gain from it.
        accuracy: exact: equal to the unconstrained run, or refused. bounded: tiles where nothing
            exact fits, and their error is measured. fast: whatever takes least time. Default:
            exact, or bounded where tiles are requested.
        plan_file: Replay a plan from `lowtide plan upscale --json`, or from a report.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    budget: Annotated[str | int | Budget, Option(flags=("-b", "--budget"))] = "auto"
    host_budget: str | int | None = None
    disk_budget: str | int | None = None
    scratch: Annotated[Path | None, Option("Files")] = None
    device: str = "auto"
    devices: Annotated[tuple[str, ...], Option(metavar="LIST")] = ()
    precision: Annotated[
        Literal["auto"] | Precision, Option("Overriding the plan", hint=_PRECISION_HINT)
    ] = "auto"
    accuracy: Literal["exact", "bounded", "fast"] | None = None
    plan_file: Annotated[Path | None, Option(flags=("--plan",), metavar="FILE")] = None

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
