"""Settings of a denoising job, validated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Le

from lowtide.core.errors import UsageError
from lowtide.core.input_file import file_sha256, require_input
from lowtide.core.option import Count, Option, Seed
from lowtide.jobs.images.model_choice import DENOISER
from lowtide.jobs.images.settings import ImageSettings
from lowtide.models.denoiser.config import TIMES, SchedulerName

if TYPE_CHECKING:
    from lowtide.jobs.images.chosen_noise import ChosenNoise
    from lowtide.models import ModelDescriptor

_RAW, _CONTROL = "Camera RAW", "Control"


@dataclass(frozen=True, kw_only=True)
class DenoiseSettings(ImageSettings):
    """Settings of a denoising job, except its files.

    Attributes:
        model: A denoiser: lowtide-photo-denoise, lowtide-denoise, or a .safetensors file. Default:
            the first for color pictures in one step, else the second.
        kind: What the inputs are: image, raw for undeveloped files of cameras, or volume for NIfTI
            files. auto goes by their names.
        sigma: Standard deviation of the noise, in levels of 255, for camera RAW in levels of the
            file, and for volumes in data units. Default: estimated from each image; in pictures
            also of noise that neighboring pixels share, as after demosaicing, resizing or JPEG.
        noise: Kind of the noise: gaussian, or poisson-gaussian, which is stronger where an image is
            brighter, both estimated from each image; of volumes rician, that of magnitudes, whose
            offset is removed; or a table of lowtide train noise, such as camera.json. Default:
            gaussian.
        iso: ISO of all inputs, where the table has several. Default: that of a camera RAW file.
        black_level: Black level of camera RAW files, in their levels. Default: that of each file.
        hot_pixels: Mend pixels of camera RAW files that are far above their neighbors, and alone,
            before anything else.
        raw_output: What is written of camera RAW files: linear is demosaiced 16-bit values in
            proportion to light, developed a picture, mosaic the sensor's values. auto: linear in a
            TIFF, else developed.
        steps: Runs of the network, from the noise level of the image down to none, each of which
            takes the time of the first. One gives the expected image, which is nearest to the clean
            one of most pictures; more look sharper.
        scheduler: How the noise falls over several steps: ddim adds none, or as much as --eta says;
            ddpm adds as much as the training process; dpmsolver++ and unipc are ddim that looks at
            earlier steps too, where there are three or more; flow is ddim at other levels. Default:
            the model's.
        eta: Share of ddpm's noise that ddim adds: 0 to 1.
        seed: Seed of the noise that is added.
        strength: How far the result goes from the input: 0 is the input, 1 denoised, and between
            them samples are mixed in proportion.
        chroma_only: Denoise the colors of pictures alone: brightness stays as it is, grain too.
        mask: Of pictures, one of the same size that restricts: white is denoised, black stays, and
            gray is mixed. Of volumes, a NIfTI file with a label for each voxel: where it is 0,
            voxels are copied; where there are 1 for signal and 2 for background, the report has SNR
            and CNR of both.
        preview: Denoise and write this part of a picture alone, in pixels from its left and upper
            edge, with the noise level of all of it.
        slices: Denoise each slice of a series of volumes by itself with the network, rather than
            all volumes by what they share. So it is with --model, --steps or --self-ensemble too.
    """

    kind: Annotated[Literal["auto", "image", "raw", "volume"], Option("Files")] = "auto"
    sigma: Annotated[
        Annotated[float, Ge(0)] | None, Option("Noise", metavar="LEVELS", example=25)
    ] = None

    noise: Annotated[str | Path | None, Option("Noise", metavar="FILE|NAME")] = None
    iso: Annotated[Count | None, Option("Noise", metavar="N", example=800)] = None
    black_level: Annotated[
        Annotated[float, Ge(0), Le(65_535)] | None, Option(_RAW, metavar="LEVEL", example=512)
    ] = None
    hot_pixels: Annotated[bool, Option(_RAW)] = False
    raw_output: Annotated[Literal["auto", "linear", "developed", "mosaic"], Option(_RAW)] = "auto"
    steps: Annotated[int, Ge(1), Le(TIMES), Option("Noise", metavar="N")] = 1
    scheduler: Annotated[
        SchedulerName | None, Option("Noise", flags=("--scheduler", "--sd-scheduler"))
    ] = None
    eta: Annotated[float, Ge(0), Le(1), Option("Noise")] = 0.0
    seed: Annotated[Seed, Option("Noise")] = 0
    strength: Annotated[float, Ge(0), Le(1), Option(_CONTROL, metavar="0..1", example=0.5)] = 1.0
    chroma_only: Annotated[bool, Option(_CONTROL)] = False
    mask: Annotated[str | Path | None, Option(_CONTROL, metavar="FILE")] = None
    preview: Annotated[tuple[int, int, int, int] | None, Option(_CONTROL, metavar="X,Y,W,H")] = None
    slices: Annotated[bool, Option("Noise")] = False

    hashed: ClassVar[str] = (
        "sigma iso steps scheduler eta seed format precision accuracy strategy self_ensemble"
        " compile cuda_graphs tile tile_overlap tile_batch_size hann_blend strip_metadata"
        " png_compression jpeg_quality webp_quality webp_lossless avif_quality tiff_compression"
        " black_level raw_output hot_pixels strength chroma_only preview slices"
    )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; ``preview`` may be text, ``"X,Y,W,H"``."""
        return super().of(**{**values, "preview": _parse_crop(values.get("preview"))})

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        self._check_noise()
        if self.mask is not None:
            require_input(Path(self.mask), UsageError, hint="--mask names a file that exists")
        if self.eta and self.scheduler not in (None, "ddim"):
            raise UsageError(
                f"--eta is for ddim, and --scheduler is {self.scheduler}", hint="drop one of them"
            )
        if self.steps == 1 and (self.eta or self.scheduler is not None):
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

    def _check_noise(self) -> None:
        if self.iso is not None and self.noise is None:
            raise UsageError(
                f"--iso {self.iso} chooses from a table, and --noise gives none",
                hint=f"--noise camera.json --iso {self.iso}",
            )
        if self.sigma is not None and self.noise not in (None, "gaussian", "rician"):
            raise UsageError(
                "--sigma is the level of gaussian or rician noise, and --noise"
                f" {self.noise} tells its own",
                hint="drop one of them",
            )
        _ = self.chosen_noise

    @cached_property
    def chosen_noise(self) -> ChosenNoise | None:
        """What ``--noise`` chose, None without it; raises as `choose_noise`."""
        from lowtide.jobs.images.chosen_noise import choose_noise

        return None if self.noise is None else choose_noise(self.noise, self.iso)

    def content_hash(self, model_sha256: str, precision: str) -> str:
        """Return a SHA-256 of all that determines the result's bytes, except the input."""
        own = super().content_hash(model_sha256, precision)
        for key in filter(None, (self._noise_key, self._mask_key)):
            own = hashlib.sha256(f"{own} {key}".encode()).hexdigest()
        return own

    def made_with(self, model_sha256: str, precision: str) -> dict[str, Any]:
        """Return what `content_hash` is of, by name."""
        own = super().made_with(model_sha256, precision)
        return own | {"noise": self._noise_key, "mask": self._mask_key}

    @property
    def is_blended(self) -> bool:
        """Whether a result is mixed with its input."""
        return self.strength != 1 or self.chroma_only or self.mask is not None

    @property
    def _noise_key(self) -> str:
        return "" if self.chosen_noise is None else self.chosen_noise.key

    @cached_property
    def _mask_key(self) -> str:
        return "" if self.mask is None else file_sha256(Path(self.mask))

    @property
    def model_name(self) -> str:
        """The model requested, or the bundled one."""
        return DENOISER if self.model is None else str(self.model)

    def check_model(self, model: ModelDescriptor) -> None:
        """Raise `UsageError` for a model that is no denoiser."""
        if model.noise is None:
            raise UsageError(
                f"{self.model_name} is no denoiser that takes a noise level",
                hint=f"--model {DENOISER}; `lowtide upscale` runs any restoration model",
            )


def _parse_crop(given: Any) -> tuple[int, int, int, int] | None:
    """Return (X, Y, W, H) of a text or of four numbers; None stays.

    Raises:
        UsageError: It is nothing of that kind.
    """
    if given is None:
        return None
    try:
        words = given.split(",") if isinstance(given, str) else given
        left, top, width, height = (int(str(word)) for word in words)
        if min(left, top) < 0 or min(width, height) < 1:
            raise ValueError
    except (TypeError, ValueError):
        raise UsageError(
            f"--preview {given} is not X,Y,W,H: left and upper edge from 0 on, and width and height"
            " of 1 or more, in whole pixels",
            hint="--preview 1000,800,400,300",
        ) from None
    return left, top, width, height
