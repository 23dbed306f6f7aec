"""Schema of a training's YAML file, validated by pydantic before anything starts.

Names are those of BasicSR and traiNNer-redux where they have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lowtide.core.errors import UsageError
from lowtide.core.suggest import closest_name

# Errors named in one message, and characters of each name.
_MAX_ERRORS, _MAX_NAME_LENGTH = 8, 60
# Device names that Windows reserves, with any suffix.
_PORT_NAMES = {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
_RESERVED_NAMES = {"con", "prn", "aux", "nul"} | _PORT_NAMES

Scale = Literal[1, 2, 3, 4, 8]
TrainPrecision = Literal["fp32", "bf16", "fp16"]
Folders = Annotated[list[Path], Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
# Keys of a log row other than scores: metrics with these names would overwrite them.
_RESERVED_LOG_KEYS = ("step", "best")


class _ConfigSection(BaseModel):
    """Base of all sections: frozen, without unknown entries, inf or NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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


class TrainData(_ConfigSection):
    """Section ``datasets.train``: images, patch and batch size, augmentation.

    With ``dataroot_lq`` the images are pairs; without it ``degradation`` makes the low-resolution
    side. ``lq_size`` is the side of a patch in low-resolution pixels. ``batch_size_per_gpu`` is
    the number of patches per step on each device, in ``accum_iter`` micro-batches; by default the
    budget decides how many.
    """

    dataroot_gt: Folders
    dataroot_lq: list[Path] = []
    filename_tmpl: str = "{}"
    degradation: Literal["bicubic", "real"] = "bicubic"
    lq_size: int = Field(default=32, ge=8)
    batch_size_per_gpu: int = Field(default=16, ge=1)
    accum_iter: int | None = Field(default=None, ge=1)
    use_hflip: bool = True
    use_rot: bool = True
    color: bool = False
    num_worker_per_gpu: int = Field(default=0, ge=0, le=64)
    skip_broken: bool = False


class ValData(_ConfigSection):
    """Section ``datasets.val``: whole images for validation.

    They are pairs, or are downscaled by an antialiased cubic filter.
    """

    dataroot_gt: Folders
    dataroot_lq: list[Path] = []
    filename_tmpl: str = "{}"


class Datasets(_ConfigSection):
    """Section ``datasets``."""

    train: TrainData
    val: ValData | None = None


class Optim(_ConfigSection):
    """Sections ``train.optim_g`` and ``train.optim_d``: Adam or AdamW."""

    type: Literal["adamw", "adam"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)


class Scheduler(_ConfigSection):
    """Section ``train.scheduler``: the learning rate schedule.

    ``cosine`` decays to ``eta_min`` (a share of the learning rate), ``multistep`` multiplies by
    ``gamma`` at each of the ``milestones``.
    """

    type: Literal["cosine", "multistep", "constant"] = "cosine"
    eta_min: float = Field(default=0.02, ge=0, le=1)
    milestones: list[Annotated[int, Field(ge=1)]] = []
    gamma: float = Field(default=0.5, gt=0, le=1)


class LossEntry(BaseModel):
    """One entry of ``train.losses``; unknown entries are options of its type.

    ``loss_weight`` rises from 0 at ``start_iter`` over ``ramp_iter`` steps, as GAN losses need.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    type: str
    loss_weight: float = Field(default=1.0, gt=0)
    start_iter: int = Field(default=0, ge=0)
    ramp_iter: int = Field(default=0, ge=0)

    @property
    def options(self) -> dict[str, Any]:
        """Options for the loss class of this type."""
        return dict(self.model_extra or {})


class Train(_ConfigSection):
    """Section ``train``: length, losses, optimizers, schedule and EMA."""

    total_iter: int = Field(ge=1)
    warmup_iter: int = Field(default=0, ge=0)
    losses: Annotated[list[LossEntry], Field(min_length=1)] = [LossEntry(type="l1loss")]
    optim_g: Optim = Optim()
    optim_d: Optim = Optim(lr=1e-4)
    scheduler: Scheduler = Scheduler()
    ema_decay: float = Field(default=0.999, ge=0, lt=1)
    ema_warmup: int = Field(default=10, ge=1)
    grad_clip: float | None = Field(default=None, gt=0)
    checkpointing: Literal["none", "selective", "full"] = "none"
    compile: bool = False

    @field_validator("losses")
    @classmethod
    def _reject_duplicate_losses(cls, losses: list[LossEntry]) -> list[LossEntry]:
        """Reject duplicate types: losses are keyed by type, so that one would be lost."""
        types = [entry.type.lower() for entry in losses]
        duplicates = [name for name in dict.fromkeys(types) if types.count(name) > 1]
        if duplicates:
            raise ValueError(f"{duplicates[0]} is listed {types.count(duplicates[0])} times")
        return losses


class Metric(_ConfigSection):
    """One entry of ``val.metrics``: a validation metric and how it is measured."""

    type: Literal["psnr", "ssim", "lpips", "dists"] = "psnr"
    crop_border: int | None = Field(default=None, ge=0)
    test_y_channel: bool = True
    weights: Path | None = None
    net: Literal["alex", "vgg"] | None = None

    @property
    def is_learned(self) -> bool:
        """Whether the metric is a network with ``weights``; then lower is better."""
        return self.type in ("lpips", "dists")

    @model_validator(mode="after")
    def _validate_options(self) -> Metric:
        if not self.is_learned and (self.weights or self.net):
            raise ValueError(f"{self.type} takes neither weights nor net")
        if self.is_learned and self.weights is None:
            raise ValueError(f"{self.type} needs weights, a file with its network's weights")
        if self.is_learned and "test_y_channel" in self.model_fields_set and self.test_y_channel:
            raise ValueError(f"{self.type} is computed in RGB: remove test_y_channel")
        if self.type == "dists" and self.net == "alex":
            raise ValueError("dists uses VGG16: remove net")
        return self


class Val(_ConfigSection):
    """Section ``val``. The first of ``metrics`` chooses the best checkpoint."""

    val_freq: int = Field(default=1000, ge=1)
    metrics: Annotated[dict[str, Metric], Field(min_length=1)] = {"psnr": Metric()}
    save_img: bool = False
    budget: str = "auto"

    @field_validator("metrics")
    @classmethod
    def _reject_reserved_names(cls, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Reject metric names that would overwrite other keys of a log row."""
        reserved = [name for name in metrics if name in _RESERVED_LOG_KEYS]
        if reserved:
            raise ValueError(f"{reserved[0]} is reserved in the log: choose another name")
        return metrics


class Logger(_ConfigSection):
    """Section ``logger``: intervals of log rows and checkpoints."""

    print_freq: int = Field(default=100, ge=1)
    save_checkpoint_freq: int = Field(default=1000, ge=1)
    use_tb_logger: bool = False


class Paths(_ConfigSection):
    """Section ``path``: pretrained weights."""

    pretrain_network_g: Path | None = None
    strict_load_g: bool = True


class TrainConfig(_ConfigSection):
    """A whole training configuration.

    ``name`` is the name of the output folder and files.
    """

    name: str = Field(pattern=r"^[\w.-]+$", max_length=100)
    scale: Scale
    manual_seed: int = Field(default=0, ge=0, lt=2**63)
    precision: TrainPrecision = "fp32"
    channels_last: bool = True
    datasets: Datasets
    network_g: dict[str, Any]
    network_d: dict[str, Any] | None = None
    train: Train
    val: Val = Val()
    logger: Logger = Logger()
    path: Paths = Paths()

    @field_validator("name")
    @classmethod
    def _validate_name(cls, name: str) -> str:
        """Reject names that leave the folder, are hidden, or are reserved on some systems."""
        if name.startswith(".") or name.endswith("."):
            raise ValueError(f"{name!r} must not begin or end with a dot")
        if name.partition(".")[0].lower() in _RESERVED_NAMES:
            raise ValueError(f"{name!r} is a reserved device name on Windows")
        return name


def read_config(path: Path | str) -> TrainConfig:
    """Read and validate a training configuration from a YAML file.

    Raises `UsageError` for a file that cannot be read, and for unknown, missing or invalid
    entries, with their place and the nearest name.
    """
    from lowtide.training.yaml_loader import read_yaml  # PyYAML is of the extra "train"

    return parse_config(read_yaml(Path(path)), str(path))


def parse_config(values: dict[str, Any], source: str = "the configuration") -> TrainConfig:
    """Validate a training configuration from plain values; raises as `read_config`."""
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
        messages = [
            _format_error(one["loc"], one["type"], one["msg"]) for one in faults[:_MAX_ERRORS]
        ]
        more = f"; and {len(faults) - _MAX_ERRORS:,} more" if len(faults) > _MAX_ERRORS else ""
        raise UsageError(f"{source}: {'; '.join(messages)}{more}") from error


def _format_error(location: Sequence[int | str], kind: str, message: str) -> str:
    dotted = ".".join(str(part)[:_MAX_NAME_LENGTH] for part in location)
    if kind == "missing":
        return f"{dotted} is missing"
    if kind != "extra_forbidden":
        return f"{dotted}: {message[0].lower()}{message[1:]}"
    suggestion = closest_name(str(location[-1])[:_MAX_NAME_LENGTH], _entry_names(location[:-1]))
    return f"{dotted} is not known{f' (did you mean {suggestion}?)' if suggestion else ''}"


def _entry_names(location: Sequence[int | str]) -> list[str]:
    """Return the entry names of the section at ``location``."""
    part: Any = TrainConfig
    for name in location:
        field = getattr(part, "model_fields", {}).get(name)
        if field is None:
            return []
        part = next(
            (
                one
                for one in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if isinstance(one, type) and issubclass(one, BaseModel)
            ),
            None,
        )
    return list(getattr(part, "model_fields", {}))
