"""Configuration base of all trainings, validated by pydantic before anything starts.

Names are those of BasicSR and traiNNer-redux where they have one. Descriptions of fields are the
help of their command-line options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lowtide.core.errors import UsageError, closest_name
from lowtide.core.option import MOST_COUNT, MOST_SEED

# Errors named in one message, and characters of each name.
_MAX_ERRORS, _MAX_NAME_LENGTH = 8, 60
# Device names that Windows reserves, with any suffix.
_PORT_NAMES = {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
_RESERVED_NAMES = {"con", "prn", "aux", "nul"} | _PORT_NAMES

TrainPrecision = Literal["fp32", "bf16", "fp16"]
Folders = Annotated[list[Path], Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _require_bounded(value: Any) -> None:
    """Refuse numbers of which no size can be made, in lists and dictionaries too."""
    if isinstance(value, int | float) and abs(value) > MOST_COUNT:
        raise PydanticCustomError(
            "too_large", "has to be at most {most}", {"most": f"{MOST_COUNT:,}"}
        )
    if isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            _require_bounded(one)


class ConfigSection(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Base of all sections: frozen, without unknown entries, inf, NaN or numbers beyond 2**31."""

    @field_validator("*")
    @classmethod
    def _require_bounded(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name != "manual_seed":
            _require_bounded(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _wrap_single_folder(cls, values: Any) -> Any:
        """Accept a single folder instead of a list of one."""
        if isinstance(values, dict):
            values = {
                key: [one] if str(key).startswith("dataroot_") and isinstance(one, str) else one
                for key, one in values.items()
            }
        return values


class TrainDataSection(ConfigSection, frozen=True):
    """Section ``datasets.train`` common to all trainings: the batch."""

    batch_size_per_gpu: int = Field(
        default=16, ge=1, description="Samples in a step on each device."
    )
    accum_iter: int | None = Field(
        default=None,
        ge=1,
        description="Micro-batches in a step. Default: as few as the budget allows.",
    )


class DatasetsSection(ConfigSection, frozen=True):
    """Section ``datasets``."""

    train: TrainDataSection


class OptimSection(ConfigSection, frozen=True):
    """Optimizer of one network: Adam or AdamW."""

    type: Literal["adamw", "adam"] = Field(default="adamw", description="The optimizer.")
    lr: float = Field(default=1e-3, gt=0, le=10, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.99), description="Decay of the gradient's mean and of its square."
    )
    weight_decay: float = Field(default=0.0, ge=0, le=1000, description="Weight decay.")


class SchedulerSection(ConfigSection, frozen=True):
    """Section ``train.scheduler``: the learning rate schedule."""

    type: Literal["cosine", "multistep", "constant"] = Field(
        default="cosine",
        description="cosine decays to eta_min, multistep multiplies by gamma at milestones.",
    )
    eta_min: float = Field(
        default=0.02, ge=0, le=1, description="Last learning rate of cosine, as a share of lr."
    )
    milestones: list[Annotated[int, Field(ge=1)]] = Field(
        default=[], description="Steps of multistep."
    )
    gamma: float = Field(default=0.5, gt=0, le=1, description="Factor of multistep.")


class LossEntry(BaseModel, extra="allow", frozen=True, allow_inf_nan=False):
    """One entry of ``train.losses``; unknown entries are options of its type.

    ``loss_weight`` rises from 0 at ``start_iter`` over ``ramp_iter`` steps, as GAN losses need.
    """

    type: str
    loss_weight: float = Field(default=1.0, gt=0)
    start_iter: int = Field(default=0, ge=0)
    ramp_iter: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _require_bounded(self) -> Self:
        _require_bounded(self.model_dump())
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Options for the loss class of this type."""
        return dict(self.model_extra or {})


class TrainSection(ConfigSection, frozen=True):
    """Section ``train`` as far as all trainings have it: length, schedule and EMA."""

    total_iter: int = Field(ge=1, description="Steps of the training.")
    warmup_iter: int = Field(
        default=0, ge=0, description="Steps over which the learning rate rises."
    )
    scheduler: SchedulerSection = SchedulerSection()
    ema_decay: float = Field(
        default=0.999, ge=0, lt=1, description="Decay of the weights' moving average, the result."
    )
    ema_warmup: int = Field(
        default=10, ge=1, description="Steps for which the average forgets faster."
    )
    grad_clip: float | None = Field(
        default=None, gt=0, description="Largest norm of a network's gradient. Default: no limit."
    )
    checkpointing: Literal["none", "selective", "full"] = Field(
        default="none", description="What the backward pass recomputes, to take less memory."
    )
    compile: bool = Field(default=False, description="Compile the networks by torch.compile.")


class ValSection(ConfigSection, frozen=True):
    """Section ``val`` as far as all trainings have it."""

    val_freq: int = Field(default=1000, ge=1, description="Steps between validations.")
    patience: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Validations without a better score after which the training stops. Default: never."
        ),
    )

    def is_due(self, step: int) -> bool:
        """Whether there is a validation after this step."""
        return step % self.val_freq == 0


class LoggerSection(ConfigSection, frozen=True):
    """Section ``logger``: intervals of log rows and checkpoints."""

    print_freq: int = Field(default=100, ge=1, description="Steps between rows of the log.")
    save_checkpoint_freq: int = Field(
        default=1000, ge=1, description="Steps between saved training states."
    )
    use_tb_logger: bool = Field(default=False, description="Write curves for TensorBoard too.")


class RunConfig(ConfigSection, frozen=True):
    """Configuration of a training run, which each kind of training extends.

    ``name`` is the name of the output folder and files.
    """

    name: str = Field(
        pattern=r"^[\w.-]+$", max_length=100, description="Name of the run's folder and weights."
    )
    manual_seed: int = Field(
        default=0, ge=0, le=MOST_SEED, description="Seed of first weights and of all samples."
    )
    precision: TrainPrecision = Field(
        default="fp32", description="bf16 and fp16 are autocast over fp32 weights."
    )
    channels_last: bool = Field(
        default=True, description="Lay images out with the channels last in memory."
    )
    datasets: DatasetsSection
    train: TrainSection
    val: ValSection = ValSection()
    logger: LoggerSection = LoggerSection()

    @field_validator("name")
    @classmethod
    def _validate_name(cls, name: str) -> str:
        """Reject names that leave the folder, are hidden, or are reserved on some systems."""
        if name.startswith(".") or name.endswith("."):
            raise ValueError(f"{name!r} must not begin or end with a dot")
        if name.partition(".")[0].lower() in _RESERVED_NAMES:
            raise ValueError(f"{name!r} is a reserved device name on Windows")
        return name

    @classmethod
    def from_file(cls, path: Path | str) -> Self:
        """Read and validate a configuration from a YAML file.

        Raises `UsageError` for a file that cannot be read, and for unknown, missing or invalid
        entries, with their place and the nearest name.
        """
        from lowtide.training.yaml_loader import read_yaml  # PyYAML is of the extra "train"

        return cls.from_values(read_yaml(Path(path)), str(path))

    @classmethod
    def from_values(
        cls,
        values: Mapping[str, Any],
        source: str = "the configuration",
        options: Mapping[str, str] | None = None,
    ) -> Self:
        """Validate a configuration from plain values; raises as `from_file`.

        ``options`` maps dotted keys to the command-line options that gave their values, which
        messages name instead.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            faults = error.errors()
            messages = [
                _format_error(cls, one["loc"], one["type"], one["msg"], options or {})
                for one in faults[:_MAX_ERRORS]
            ]
            more = f"; and {len(faults) - _MAX_ERRORS:,} more" if len(faults) > _MAX_ERRORS else ""
            raise UsageError(f"{source}: {'; '.join(messages)}{more}") from error


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in a field's annotation (``X``, ``X | None``), or None."""
    for one in members_of(annotation):
        if isinstance(one, type) and issubclass(one, ConfigSection):
            return one
    return None


def members_of(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union without None, or the one type that it is."""
    union = isinstance(annotation, UnionType) or get_origin(annotation) is Union
    found = get_args(annotation) if union else (annotation,)
    return tuple(one for one in found if one is not type(None))


def _format_error(
    config: type[BaseModel],
    location: Sequence[int | str],
    kind: str,
    message: str,
    options: Mapping[str, str],
) -> str:
    dotted = _place(location, options)
    if kind == "missing":
        return f"{dotted} is missing"
    if kind != "extra_forbidden":
        return f"{dotted}: {message[0].lower()}{message[1:]}"
    known = _entry_names(config, location[:-1])
    suggestion = closest_name(str(location[-1])[:_MAX_NAME_LENGTH], known)
    return f"{dotted} is not known{f' (did you mean {suggestion}?)' if suggestion else ''}"


def _place(location: Sequence[int | str], options: Mapping[str, str]) -> str:
    """Return the dotted key, whose beginning is an option if one gave it."""
    parts = [str(part)[:_MAX_NAME_LENGTH] for part in location]
    for end in range(len(parts), 0, -1):
        option = options.get(".".join(parts[:end]))
        if option is not None:
            return ".".join([option, *parts[end:]])
    return ".".join(parts)


def _entry_names(config: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the entry names of the section at ``location``."""
    part: Any = config
    for name in location:
        if get_origin(part) in (dict, list):
            part = get_args(part)[-1]
            continue
        section = section_of(part)
        field = section.model_fields.get(str(name)) if section is not None else None
        part = field.annotation if field is not None else None
    section = section_of(part)
    return list(section.model_fields) if section is not None else []
