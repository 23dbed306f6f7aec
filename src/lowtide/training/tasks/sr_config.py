"""Configuration of super-resolution training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lowtide.models.families import usual_network
from lowtide.training.run_config import (
    ConfigSection,
    DatasetsSection,
    Folders,
    LossEntry,
    OptimSection,
    RunConfig,
    TrainDataSection,
    TrainSection,
    ValSection,
)

Scale = Literal[1, 2, 3, 4, 8]
# Keys of a log row other than scores: metrics with these names would overwrite them.
_RESERVED_LOG_KEYS = ("step", "best")


class PairFoldersSection(ConfigSection, frozen=True):
    """Folders of images, in pairs or of high resolution only."""

    dataroot_gt: Folders = Field(description="Folders with images, searched recursively.")
    dataroot_lq: list[Path] = Field(
        default=[], description="Folders with the same images in low resolution, in order."
    )
    filename_tmpl: str = Field(
        default="{}", description="Name of a low-resolution file; {} is that of its original."
    )


class SrTrainDataSection(PairFoldersSection, TrainDataSection, frozen=True):
    """Section ``datasets.train``: images, patch and batch size, augmentation.

    With ``dataroot_lq`` the images are pairs; without it ``degradation`` makes the low-resolution
    side.
    """

    degradation: Literal["bicubic", "photo", "real"] = Field(
        default="bicubic",
        description="How images without dataroot_lq are made small; photo: as JPEGs of quality 30 "
        "to 95, a little soft and noisy; real: strong blur, noise and JPEG, twice.",
    )
    lq_size: int = Field(default=32, ge=8, description="Side of a patch in low-resolution pixels.")
    use_hflip: bool = Field(default=True, description="Mirror half of the patches.")
    use_rot: bool = Field(default=True, description="Turn patches by quarter turns.")
    color: bool = Field(default=False, description="Change the colors of half of the patches.")
    num_worker_per_gpu: int = Field(
        default=0, ge=0, le=64, description="Threads that prepare batches; 0 is none."
    )
    skip_broken: bool = Field(
        default=False, description="Replace damaged files by others instead of stopping."
    )


class SrValDataSection(PairFoldersSection, frozen=True):
    """Section ``datasets.val``: whole images for validation.

    They are pairs, or are downscaled by an antialiased cubic filter.
    """


class SrDatasetsSection(DatasetsSection, frozen=True):
    """Section ``datasets``."""

    train: SrTrainDataSection
    val: SrValDataSection | None = None


class SrTrainSection(TrainSection, frozen=True):
    """Section ``train``: length, losses, optimizers, schedule and EMA."""

    losses: Annotated[list[LossEntry], Field(min_length=1)] = Field(
        default=[LossEntry(type="l1loss")],
        description="Losses: a list of {type: l1, loss_weight: 1, ...}.",
    )
    optim_g: OptimSection = OptimSection()
    optim_d: OptimSection = OptimSection(lr=1e-4)

    @field_validator("losses")
    @classmethod
    def _reject_duplicate_losses(cls, losses: list[LossEntry]) -> list[LossEntry]:
        """Reject duplicate types: losses are keyed by type, so that one would be lost."""
        types = [entry.type.lower() for entry in losses]
        duplicates = [name for name in dict.fromkeys(types) if types.count(name) > 1]
        if duplicates:
            raise ValueError(f"{duplicates[0]} is listed {types.count(duplicates[0])} times")
        return losses


class MetricEntry(ConfigSection, frozen=True):
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
    def _validate_options(self) -> MetricEntry:
        if not self.is_learned and (self.weights or self.net):
            raise ValueError(f"{self.type} takes neither weights nor net")
        if self.is_learned and self.weights is None:
            raise ValueError(f"{self.type} needs weights, a file with its network's weights")
        if self.is_learned and "test_y_channel" in self.model_fields_set and self.test_y_channel:
            raise ValueError(f"{self.type} is computed in RGB: remove test_y_channel")
        if self.type == "dists" and self.net == "alex":
            raise ValueError("dists uses VGG16: remove net")
        return self


class SrValSection(ValSection, frozen=True):
    """Section ``val``. The first of ``metrics`` chooses the best checkpoint."""

    metrics: Annotated[dict[str, MetricEntry], Field(min_length=1)] = Field(
        default={"psnr": MetricEntry()},
        description="Metrics by name: {psnr: {type: psnr}}; the first chooses the best weights.",
    )
    save_img: bool = Field(default=False, description="Keep the upscaled validation images.")
    budget: str = Field(default="auto", description="Memory for validation, as --budget.")

    @field_validator("metrics")
    @classmethod
    def _reject_reserved_names(cls, metrics: dict[str, MetricEntry]) -> dict[str, MetricEntry]:
        """Reject metric names that would overwrite other keys of a log row."""
        reserved = [name for name in metrics if name in _RESERVED_LOG_KEYS]
        if reserved:
            raise ValueError(f"{reserved[0]} is reserved in the log: choose another name")
        return metrics


class PathSection(ConfigSection, frozen=True):
    """Section ``path``: pretrained weights."""

    pretrain_network_g: Path | None = Field(
        default=None, description="Weights to begin with: a file or a bundled model."
    )
    strict_load_g: bool = Field(default=True, description="Require that all of them match.")


_GENERATOR, _DISCRIMINATOR = usual_network("generators"), usual_network("discriminators")


class SrConfig(RunConfig, frozen=True):
    """Configuration of a super-resolution training."""

    scale: Scale = Field(description="Upscaling factor.")
    datasets: SrDatasetsSection
    network_g: dict[str, Any] = Field(
        default={"type": _GENERATOR},
        description=f"The generator: {{type: {_GENERATOR}}} and the options of its type.",
    )
    network_d: dict[str, Any] | None = Field(
        default=None,
        description=f"A discriminator for a loss of type ganloss: {{type: {_DISCRIMINATOR}}}.",
    )
    train: SrTrainSection
    val: SrValSection = SrValSection()
    path: PathSection = PathSection()
