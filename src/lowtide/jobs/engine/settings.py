"""Settings that every job has, validated; imports nothing heavy, so that help is quick."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from lowtide.core.errors import UsageError
from lowtide.core.option import Option, Precision
from lowtide.memory.budget import Budget

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")

# An attribute in a docstring: its name, and its text with the lines that go on deeper.
_ATTRIBUTE = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)
_PRECISION_HINT = (
    "--precision auto; 8 bits are for exported files:"
    " lowtide export onnx MODEL -o FILE --precision int8 --calibrate PHOTOS"
)
_PROBLEMS = {
    "missing": "is missing",
    "greater_than": "has to be above {gt:g}",
    "greater_than_equal": "has to be at least {ge:g}",
    "less_than": "has to be below {lt:g}",
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
    name, known = str(problem["loc"][0]), settings_fields(settings)
    if name not in known:
        raise UsageError(f"there is no setting {name!r}", hint=f"one of {', '.join(known)}")
    option = known[name].option_name
    given, words = problem["input"], _PROBLEMS.get(problem["type"])
    shown = f" {given:g}" if isinstance(given, float) else f" {given}"
    # A union of "auto" and other types reports one error for each member.
    both = [one.get("ctx", {}).get("expected") for one in (problem, *more)]
    details = {
        **problem.get("ctx", {}),
        "expected": ", ".join(filter(None, both)).replace(" or ", ", "),
    }
    trouble = words.format(**details) if words else problem["msg"].lower()
    field = known[name]
    usual = field.default if field.option.example is None else field.option.example
    example = f"{option} {usual}" if usual not in (None, (), inspect.Parameter.empty) else None
    given = "" if problem["type"] == "missing" else shown
    raise UsageError(f"{option}{given} {trouble}", hint=field.option.hint or example)


@functools.cache
def type_adapter(settings: Any) -> Any:
    """Return pydantic's adapter of a settings class, which validates and dumps it."""
    from pydantic import TypeAdapter

    return TypeAdapter(settings)


@dataclass(frozen=True)
class SettingsField:
    """Field of a settings class: type, default, help from the docstring, and `Option`.

    The default of one that has to be given is ``inspect.Parameter.empty``.
    """

    name: str
    type: Any
    default: Any
    help: str
    option: Option

    @property
    def option_name(self) -> str:
        """Its long name on a command line."""
        return next(
            (one.partition("/")[0] for one in self.option.flags if one.startswith("--")),
            "--" + self.name.replace("_", "-"),
        )

    @property
    def item(self) -> Any:
        """The type of one value where it takes any number of them, else None."""
        kinds = (self.type,) if get_origin(self.type) in (tuple, Sequence) else get_args(self.type)
        lists = [one for one in kinds if get_origin(one) in (tuple, Sequence)]
        item, *more = get_args(lists[0]) if lists else (None,)
        return item if more in ([], [...]) else None

    def listed(self, value: Any) -> Any:
        """Return a value as a tuple where it takes several: text has commas between them."""
        if self.item is None:
            return value
        if value is None:
            return self.default
        if not isinstance(value, str | Path):
            return tuple(value)
        words = [str(value)] if self.option.repeats else str(value).split(",")
        return tuple(word.strip() for word in words if word.strip())


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
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        found[field.name] = SettingsField(field.name, kind, default, help, option)
    return found


def json_schema(settings: Any) -> dict[str, Any]:
    """Return the JSON schema of a settings class, for a form that asks for its fields.

    Properties have types, defaults, bounds and choices; ``description`` is the help, ``panel`` the
    group of fields, and ``option`` the name on a command line.
    """
    schema = type_adapter(settings).json_schema()
    schema["description"] = (settings.__doc__ or "").partition("\n")[0]
    for name, field in settings_fields(settings).items():
        shown = {"option": field.option_name, "panel": field.option.panel}
        schema["properties"][name] |= {"description": field.help, **shown}
    return schema


def show_keywords(settings: Any, keywords: Any) -> Callable[[F], F]:
    """Decorate a call with ``**settings`` so that its signature shows the ``keywords``.

    They are a `TypedDict` of the fields of the ``settings`` class, for type checkers and editors.
    """
    known = settings_fields(settings)
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    shown = [
        keyword(name, default=known[name].default, annotation=annotation)
        for name, annotation in keywords.__annotations__.items()
    ]

    def decorate(call: F) -> F:
        shape = inspect.signature(call)
        own = [one for one in shape.parameters.values() if one.name != "settings"]
        call.__signature__ = shape.replace(parameters=[*own, *shown])  # pyright: ignore[reportFunctionMemberAccess]
        call.keywords_of = settings, keywords  # pyright: ignore[reportFunctionMemberAccess]
        return call

    return decorate


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings of any job: made of keywords and validated.

    Each field is a keyword of the job's function and an option of its command; its text among the
    attributes is the option's help.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; raises `UsageError` for invalid ones.

        Several values may be text, such as ``"cuda:0,cuda:1"``, or None for those by default.
        """
        known = settings_fields(cls)
        given = {
            name: known[name].listed(value) if name in known else value
            for name, value in values.items()
        }
        settings = validate_settings(cls, given)
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


@dataclass(frozen=True, kw_only=True)
class RunSettings(JobSettings):
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

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        if self.devices and self.device != "auto":
            raise UsageError("--device and --devices contradict each other", hint="drop one")

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices to run on, as they were named."""
        return self.devices or (self.device,)

    def parse_budget(self, device: str, scratch: Path) -> Budget:
        """Return the `Budget` of ``--budget``, ``--host-budget`` and ``--disk-budget`` on a device.

        Scratch files are in the folder ``scratch``.
        """
        return Budget.parse(
            self.budget,
            device=device,
            host=self.host_budget,
            disk=self.disk_budget,
            scratch=scratch,
        )
