"""What a training run is told: a YAML file in the field's terms, checked before anything starts.

Names are those of BasicSR and traiNNer-redux where they have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lowtide.core.errors import UsageError
from lowtide.core.suggest import closest_name

# So many faults are told one by one, in so many letters each.
_NAMED, _LONGEST = 8, 60
# Names that Windows keeps for itself, whatever follows a dot in them.
_PORTS = {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
_DEVICES = {"con", "prn", "aux", "nul"} | _PORTS

Scale = Literal[1, 2, 3, 4, 8]
TrainPrecision = Literal["fp32", "bf16", "fp16"]
Folders = Annotated[list[Path], Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
# What a row of the log has beside the scores, which are kept in it by their names.
_LOG_WORDS = ("step", "best")


class _ConfigSection(BaseModel):
    """A part of the file: no entry that is not known, none of another type, and no number that is
    not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_folder(cls, values: Any) -> Any:
        """A single folder may stand for a list of one."""
        if isinstance(values, dict):
            values = {
                key: [one] if str(key).startswith("dataroot_") and isinstance(one, str) else one
                for key, one in values.items()
            }
        return values


class TrainData(_ConfigSection):
    """``datasets.train``: ``dataroot_lq`` makes pairs; without it ``degradation`` makes them.

    ``lq_size`` is the side of a patch in low-resolution pixels, ``batch_size_per_gpu`` how many
    make one step on each device, in ``accum_iter`` parts or as many as the budget asks for.
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
    """``datasets.val``: whole pictures, as pairs or shrunk by an antialiased cubic filter."""

    dataroot_gt: Folders
    dataroot_lq: list[Path] = []
    filename_tmpl: str = "{}"


class Datasets(_ConfigSection):
    """``datasets``."""

    train: TrainData
    val: ValData | None = None


class Optim(_ConfigSection):
    """``optim_g`` and ``optim_d``."""

    type: Literal["adamw", "adam"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)


class Scheduler(_ConfigSection):
    """``scheduler``: a cosine down to ``eta_min`` (a share of the rate), or ``gamma`` at each of
    the ``milestones``."""

    type: Literal["cosine", "multistep", "constant"] = "cosine"
    eta_min: float = Field(default=0.02, ge=0, le=1)
    milestones: list[Annotated[int, Field(ge=1)]] = []
    gamma: float = Field(default=0.5, gt=0, le=1)


class LossEntry(BaseModel):
    """One of ``losses``: other entries are options of its type.

    Of a GAN loss ``loss_weight`` rises from 0 at ``start_iter`` over ``ramp_iter`` steps.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    type: str
    loss_weight: float = Field(default=1.0, gt=0)
    start_iter: int = Field(default=0, ge=0)
    ramp_iter: int = Field(default=0, ge=0)

    @property
    def options(self) -> dict[str, Any]:
        """What the type itself is told."""
        return dict(self.model_extra or {})


class Train(_ConfigSection):
    """``train``."""

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
    def _once_each(cls, losses: list[LossEntry]) -> list[LossEntry]:
        """Losses are told and weighed by their type: of two alike, one would be lost."""
        types = [entry.type.lower() for entry in losses]
        twice = [name for name in dict.fromkeys(types) if types.count(name) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is there {types.count(twice[0])} times")
        return losses


class Metric(_ConfigSection):
    """One of ``val.metrics``: how it is measured, and whether the best weights are chosen by it."""

    type: Literal["psnr", "ssim", "lpips", "dists"] = "psnr"
    crop_border: int | None = Field(default=None, ge=0)
    test_y_channel: bool = True
    weights: Path | None = None
    net: Literal["alex", "vgg"] | None = None

    @property
    def learned(self) -> bool:
        """Whether a network with ``weights`` looks at the pictures; then lower is better."""
        return self.type in ("lpips", "dists")

    @model_validator(mode="after")
    def _suits(self) -> Metric:
        if not self.learned and (self.weights or self.net):
            raise ValueError(f"{self.type} has no weights and no net")
        if self.learned and self.weights is None:
            raise ValueError(f"{self.type} needs weights, a file of the network that looks")
        if self.learned and "test_y_channel" in self.model_fields_set and self.test_y_channel:
            raise ValueError(f"{self.type} is of RGB: leave test_y_channel out")
        if self.type == "dists" and self.net == "alex":
            raise ValueError("dists looks by VGG16: leave net out")
        return self


class Val(_ConfigSection):
    """``val``. The first of ``metrics`` chooses the best checkpoint."""

    val_freq: int = Field(default=1000, ge=1)
    metrics: Annotated[dict[str, Metric], Field(min_length=1)] = {"psnr": Metric()}
    save_img: bool = False
    budget: str = "auto"

    @field_validator("metrics")
    @classmethod
    def _named_apart(cls, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """A score named as something else in the log's rows would take its place."""
        taken = [name for name in metrics if name in _LOG_WORDS]
        if taken:
            raise ValueError(f"{taken[0]} is what the log calls something else: another name")
        return metrics


class Logger(_ConfigSection):
    """``logger``."""

    print_freq: int = Field(default=100, ge=1)
    save_checkpoint_freq: int = Field(default=1000, ge=1)
    use_tb_logger: bool = False


class Paths(_ConfigSection):
    """``path``."""

    pretrain_network_g: Path | None = None
    strict_load_g: bool = True


class TrainConfig(_ConfigSection):
    """A whole file. ``name`` is that of the folder and the files that are made."""

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
    def _one_folder_name(cls, name: str) -> str:
        """A name that leads elsewhere, is hidden, or is none on some systems, is refused."""
        if name.startswith(".") or name.endswith("."):
            raise ValueError(f"{name!r} begins or ends with a dot")
        if name.partition(".")[0].lower() in _DEVICES:
            raise ValueError(f"{name!r} is a device's name on Windows")
        return name


def read_config(path: Path | str) -> TrainConfig:
    """A configuration from its file.

    Raises `UsageError` for a file that cannot be read, and, with the place and the nearest name,
    for entries that are unknown, missing or not possible.
    """
    from lowtide.training.yaml_loader import read_yaml  # which the extra "train" brings along

    return parse_config(read_yaml(Path(path)), str(path))


def parse_config(given: dict[str, Any], where: str = "the configuration") -> TrainConfig:
    """A configuration from plain values; raises as `read_config`."""
    try:
        return TrainConfig.model_validate(given)
    except ValidationError as error:
        faults = error.errors()
        told = [_told(one["loc"], one["type"], one["msg"]) for one in faults[:_NAMED]]
        more = f"; and {len(faults) - _NAMED:,} more" if len(faults) > _NAMED else ""
        raise UsageError(f"{where}: {'; '.join(told)}{more}") from error


def _told(place: Sequence[int | str], kind: str, message: str) -> str:
    dotted = ".".join(str(part)[:_LONGEST] for part in place)
    if kind == "missing":
        return f"{dotted} is missing"
    if kind != "extra_forbidden":
        return f"{dotted}: {message[0].lower()}{message[1:]}"
    meant = closest_name(str(place[-1])[:_LONGEST], _known(place[:-1]))
    return f"{dotted} is not known{f' (did you mean {meant}?)' if meant else ''}"


def _known(place: Sequence[int | str]) -> list[str]:
    """The entries of a part of the file."""
    part: Any = TrainConfig
    for name in place:
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
