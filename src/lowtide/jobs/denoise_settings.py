"""Settings of a denoising job, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Le

from lowtide.core.errors import UsageError
from lowtide.core.option import Option
from lowtide.jobs.image_settings import ImageSettings

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
    """

    sigma: Annotated[
        Annotated[float, Ge(0), Le(255)] | None, Option("Noise", metavar="LEVELS", example=25)
    ] = None

    hashed: ClassVar[str] = (
        "sigma format precision accuracy strategy self_ensemble compile cuda_graphs tile"
        " tile_overlap tile_batch_size hann_blend strip_metadata png_compression jpeg_quality"
        " webp_quality webp_lossless avif_quality tiff_compression"
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
                f"{self.model_name} is no denoiser that can be told the noise level",
                hint=f"--model {DEFAULT_MODEL}; `lowtide upscale` runs any restoration model",
            )
        for denoiser in denoisers_in(model.module):
            denoiser.set_level(_NOMINAL_SIGMA)
