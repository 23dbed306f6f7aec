"""Settings of a denoising job, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Le

from lowtide.core.errors import UsageError
from lowtide.core.option import Option
from lowtide.core.precision import is_eight_bits
from lowtide.jobs.image_settings import ImageSettings
from lowtide.models.denoiser.slim_unet_config import TIMES, SchedulerName

if TYPE_CHECKING:
    from lowtide.models import Model

DEFAULT_MODEL = "lowtide-denoise"
# Level at which a network is measured; its costs are the same at every level.
_NOMINAL_SIGMA = 25 / 255


@dataclass(frozen=True, kw_only=True)
class DenoiseSettings(ImageSettings):
    """Settings of a denoising job, except its files.

    Attributes:
        model: A denoiser: lowtide-denoise, the bundled one, or a .safetensors file.
        sigma: Standard deviation of the noise, in levels of 255. Default: estimated from each
            image.
        steps: Runs of the network, from the noise level of the image down to none, each of which
            takes the time of the first. One gives the expected image, more give sharper ones.
        scheduler: How the noise falls over several steps: ddim adds none, or as much as --eta says;
            ddpm adds as much as the training process; dpmsolver++ and unipc are ddim that looks at
            earlier steps too, where there are three or more; flow is ddim at other levels.
        eta: Share of ddpm's noise that ddim adds: 0 to 1.
        seed: Seed of the noise that is added.
    """

    sigma: Annotated[
        Annotated[float, Ge(0), Le(255)] | None, Option("Noise", metavar="LEVELS", example=25)
    ] = None

    steps: Annotated[int, Ge(1), Le(TIMES), Option("Noise", metavar="N")] = 1
    scheduler: Annotated[SchedulerName, Option("Noise")] = "ddim"
    eta: Annotated[float, Ge(0), Le(1), Option("Noise")] = 0.0
    seed: Annotated[int, Ge(0), Le(2**63 - 1), Option("Noise")] = 0

    hashed: ClassVar[str] = (
        "sigma steps scheduler eta seed format precision accuracy strategy self_ensemble compile"
        " cuda_graphs tile tile_overlap tile_batch_size hann_blend strip_metadata png_compression"
        " jpeg_quality webp_quality webp_lossless avif_quality tiff_compression"
    )

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        if is_eight_bits(self.precision):
            raise UsageError(
                f"{self.precision} is for networks of linear layers, and denoisers are of"
                " convolutions",
                hint="--precision bf16",
            )
        if self.eta and self.scheduler != "ddim":
            raise UsageError(
                f"--eta is for ddim, and --scheduler is {self.scheduler}", hint="drop one of them"
            )
        if self.steps == 1 and (self.eta or self.scheduler != "ddim"):
            raise UsageError(
                "a single step goes to the clean image at once: --scheduler and --eta are for more",
                hint="--steps 4",
            )
        tiled = self.strategy == "tiled" or self.overrides.requires_tiles
        if self.steps > 1 and (tiled or self.accuracy_request != "exact"):
            raise UsageError(
                "over several steps the error of tiles is not measured",
                hint="--steps 1, or drop --accuracy, --strategy tiled and the tile options",
            )

    @property
    def model_name(self) -> str:
        """The model requested, or the bundled one."""
        return DEFAULT_MODEL if self.model is None else str(self.model)

    def check_model(self, model: Model) -> None:
        """Raise `UsageError` for a model that is no denoiser, and set the level of one."""
        from lowtide.models.denoiser.denoiser import denoisers_in

        if model.descriptor.noise is None:
            raise UsageError(
                f"{self.model_name} is no denoiser that takes a noise level",
                hint=f"--model {DEFAULT_MODEL}; `lowtide upscale` runs any restoration model",
            )
        for denoiser in denoisers_in(model.module):
            denoiser.set_level(_NOMINAL_SIGMA)
