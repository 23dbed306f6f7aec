"""Configuration of a denoiser's training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lowtide.models.denoiser.config import AttentionName, Prediction, SchedulerName
from lowtide.training.run_config import (
    ConfigSection,
    DatasetsSection,
    Folders,
    OptimSection,
    RunConfig,
    SchedulerSection,
    TrainDataSection,
    TrainSection,
    ValSection,
)

Share = Annotated[float, Field(ge=0, le=1)]
Levels = Annotated[float, Field(ge=0, le=255)]
Positives = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]


class PhotographDataSection(TrainDataSection, frozen=True):
    """Section ``datasets.train``: photographs, what of them is trained on, and the noise."""

    batch_size_per_gpu: int = Field(
        default=8, ge=1, description="Patches in a step on each device."
    )
    dataroot_gt: Folders = Field(
        description="Folders with photographs without noise, searched recursively."
    )
    patch_size: int = Field(default=96, ge=8, description="Side of a patch in pixels.")
    noise: str = Field(
        default="gaussian",
        description=(
            "gaussian or poisson-gaussian, at levels drawn from sigma, or the table of a camera"
            " that lowtide train noise wrote, at ISOs drawn from its range."
        ),
    )
    sigma: tuple[Levels, Levels] = Field(
        default=(0, 60),
        description="Lowest and highest level of noise without a table, at mid-gray, of 255.",
    )
    clipped: Share | None = Field(
        default=None,
        description=(
            "Share of patches with values clipped and rounded, to 8 bits or where linear to 16, as"
            " files have them. Default: 0.25, and 0 where the noise of a table clips by itself."
        ),
    )
    gray: Share = Field(default=0.5, description="Share of patches that are made gray.")
    linear: bool | None = Field(
        default=None,
        description=(
            "Convert photographs from sRGB to values in proportion to light before noise is added:"
            " right for tables of undeveloped files. Default: with tables of raw-camera noise only."
        ),
    )
    cfa: Literal["RGGB", "BGGR", "GRBG", "GBRG"] | None = Field(
        default=None,
        description="Train on color filter mosaics of this pattern, with network.channels 1.",
    )
    use_hflip: bool = Field(default=True, description="Mirror half of the patches.")
    use_rot: bool = Field(default=True, description="Turn patches by quarter turns.")
    color: bool = Field(default=False, description="Change the colors of half of the patches.")
    num_worker_per_gpu: int = Field(
        default=0, ge=0, le=64, description="Threads that prepare batches; 0 is none."
    )
    skip_broken: bool = Field(
        default=False, description="Replace damaged files by others instead of stopping."
    )

    @model_validator(mode="after")
    def _check_levels(self) -> PhotographDataSection:
        low, high = self.sigma
        if low > high or high == 0:
            raise ValueError(f"sigma has to rise to a level above 0, not from {low:g} to {high:g}")
        return self


class CleanPicturesSection(ConfigSection, frozen=True):
    """Section ``datasets.val``: whole photographs for validation."""

    dataroot_gt: Folders = Field(description="Folders with photographs, searched recursively.")


class DenoiseDatasetsSection(DatasetsSection, frozen=True):
    """Section ``datasets``."""

    train: PhotographDataSection
    val: CleanPicturesSection | None = None


class SlimNetworkSection(ConfigSection, frozen=True):
    """Section ``network``: fields of `SlimUNetConfig` that a training does not know itself."""

    channels: Literal[1, 3] = Field(default=3, description="Channels of images: 3, or 1 for gray.")
    features: int = Field(default=32, ge=1, description="Channels of the top level.")
    multipliers: Positives = Field(
        default=[1, 2, 4], description="Channels of each level, times features."
    )
    blocks: int = Field(
        default=1, ge=1, le=1000, description="Blocks of each level on either side."
    )
    groups: int = Field(default=8, ge=1, description="Groups of norms.")
    embedding: int = Field(default=128, ge=4, description="Values that embed the noise level.")
    attention: AttentionName = Field(default="linear", description="Kind of attention.")
    attention_levels: list[int] = Field(
        default=[-1], description="Levels with attention: 0 is the top one, -1 the lowest."
    )
    prediction: Prediction = Field(
        default="v", description="What the network returns, in the terms of diffusers."
    )
    scheduler: SchedulerName = Field(
        default="ddim",
        description="How lowtide denoise --steps N takes its steps, unless an option says.",
    )


class DenoiseTrainSection(TrainSection, frozen=True):
    """Section ``train``: length, optimizer, schedule and EMA."""

    warmup_iter: int = Field(
        default=100, ge=0, description="Steps over which the learning rate rises."
    )
    scheduler: SchedulerSection = SchedulerSection()
    ema_decay: float = Field(
        default=0.998, ge=0, lt=1, description="Decay of the weights' moving average, the result."
    )
    grad_clip: float | None = Field(
        default=1.0, gt=0, description="Largest norm of the gradient; null: no limit."
    )
    optim: OptimSection = OptimSection(lr=2e-3, weight_decay=1e-3)


class DenoiseValSection(ValSection, frozen=True):
    """Section ``val``: how whole photographs of ``datasets.val`` are denoised."""

    steps: int = Field(
        default=1, ge=1, le=1000, description="Steps, as lowtide denoise --steps takes them."
    )
    save_img: bool = Field(default=False, description="Keep the denoised photographs.")
    budget: str = Field(default="auto", description="Memory for validation, as --budget.")


class DenoiseConfig(RunConfig, frozen=True):
    """Configuration of a denoiser's training."""

    datasets: DenoiseDatasetsSection
    network: SlimNetworkSection = SlimNetworkSection()
    train: DenoiseTrainSection
    val: DenoiseValSection = DenoiseValSection()

    @model_validator(mode="after")
    def _check_mosaic(self) -> DenoiseConfig:
        cfa = self.datasets.train.cfa
        if cfa is not None and self.network.channels != 1:
            raise ValueError(
                f"cfa {cfa}: a mosaic has one channel, so network.channels has to be 1"
            )
        return self
