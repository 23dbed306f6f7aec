"""Settings of every job that enlarges pictures, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from annotated_types import Gt, Le

from lowtide.core.errors import UsageError
from lowtide.core.option import Count, Option
from lowtide.jobs.images.model_choice import CLEAN, PHOTO_DENOISER
from lowtide.jobs.images.settings import ImageSettings
from lowtide.models.model_files import is_onnx

if TYPE_CHECKING:
    from lowtide.media.image_info import ImageInfo
    from lowtide.models import ModelDescriptor

_SIZE = "Target size"


@dataclass(frozen=True, kw_only=True)
class EnlargeSettings(ImageSettings):
    """Settings of a job that enlarges pictures, except its files.

    The target size is one of ``scale``, ``width`` and/or ``height`` (one keeps the aspect ratio,
    both are taken as they are), or ``max_side``; none means the model's own scale.

    Attributes:
        scale: Size of the result relative to the input; resized after the model if necessary.
        width: Width of the result; the height follows unless --height is given too.
        height: Height of the result.
        max_side: Longer side of the result.
        denoise: Remove noise before, in the same pass: auto at the level that is estimated of each
            picture, and of a clip from its first frames, or at this standard deviation in levels of
            255.
    """

    scale: Annotated[
        Annotated[float, Gt(0), Le(64)] | None, Option(_SIZE, flags=("-s", "--scale"), example=2)
    ] = None
    width: Annotated[Count | None, Option(_SIZE)] = None
    height: Annotated[Count | None, Option(_SIZE)] = None
    max_side: Annotated[Count | None, Option(_SIZE)] = None
    denoise: Annotated[
        Literal["auto"] | float | None, Option(metavar="auto|SIGMA", example="auto")
    ] = None

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; ``denoise`` may be a number as text."""
        return super().of(**{**values, "denoise": _parse_level(values.get("denoise"))})

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        ways = {
            "--scale": self.scale is not None,
            "--width/--height": self.width is not None or self.height is not None,
            "--max-side": self.max_side is not None,
        }
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1:
            raise UsageError(
                f"{' and '.join(chosen)} contradict each other", hint=f"keep {chosen[0]} only"
            )
        if is_onnx(self.model_name):
            self._check_onnx()

    def _check_onnx(self) -> None:
        """Require settings that ONNX Runtime supports for an ONNX file."""
        places = sorted({self.device, *self.devices} - {"auto", "cpu"})
        weights = "the PyTorch weights that it was exported from"
        if places:
            no, hint = f"on {places[0]}: that has not been verified", f"--device cpu, or {weights}"
        elif self.precision not in ("auto", "fp32"):
            no = f"in {self.precision}: its data types are those of the file"
            hint = "--precision auto; `lowtide export onnx MODEL --precision fp16` makes another"
        elif self.compile == "on":
            no, hint = "by PyTorch's compiler, but by ONNX Runtime", "--compile off"
        elif self.denoise is not None:
            no = "behind a denoiser, which PyTorch runs"
            hint = f"lowtide denoise INPUT -o OUTPUT beforehand, or {weights}"
        elif self.strategy == "streamed":
            no = "in bands of rows: ONNX Runtime runs its whole graph"
            hint = f"--strategy whole or tiled, or {weights}"
        else:
            return
        raise UsageError(f"{self.model_name} is an ONNX file and is not run {no}", hint=hint)

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices to run on; for an ONNX file ``auto`` is the CPU."""
        if self.devices or self.device != "auto" or not is_onnx(self.model_name):
            return super().device_names
        return ("cpu",)

    @property
    def model_name(self) -> str:
        """The model requested, or the bundled one for clean pictures that suits the target size."""
        return CLEAN.format(self.bundled_scale) if self.model is None else str(self.model)

    @property
    def bundled_scale(self) -> int:
        """Scale of the bundled model that suits the target size."""
        return 4 if self.scale is not None and self.scale > 2 else 2

    @property
    def denoiser(self) -> str | None:
        """The denoiser whose results the model gets, if any."""
        return None if self.denoise is None else PHOTO_DENOISER

    def check_model(self, model: ModelDescriptor) -> None:
        """Raise `UsageError` for a denoiser, which has to be told the noise level."""
        if model.noise is not None:
            raise UsageError(
                f"{self.model_name} is a denoiser",
                hint=f"lowtide denoise INPUT -o OUTPUT --model {self.model_name}",
            )

    def target_size(self, info: ImageInfo, model_scale: int) -> tuple[int, int]:
        """Return (W, H) of the output file for an image with ``info``."""
        width, height = self.exact_size(info.width, info.height, model_scale)
        return whole_side(width), whole_side(height)

    def exact_size(self, width: float, height: float, model_scale: int) -> tuple[float, float]:
        """Return (W, H) of the output for an input of ``width`` and ``height``, not rounded."""
        if self.width is not None and self.height is not None:
            return self.width, self.height
        if self.width is not None:
            factor = self.width / width
        elif self.height is not None:
            factor = self.height / height
        elif self.max_side is not None:
            factor = self.max_side / max(width, height)
        else:
            factor = self.scale or model_scale
        return width * factor, height * factor


def whole_side(side: float, step: int = 1) -> int:
    """Return the multiple of ``step`` that is nearest to a side: of two, 1 up, others down."""
    # The tolerance keeps factors such as 0.1 + 0.2 from losing a pixel.
    half = 0.5 + 1e-9
    count = math.floor(side + half) if step == 1 else math.ceil(side / step - half)
    return step * max(1, count)


def _parse_level(given: Any) -> Any:
    """Return a noise level of ``--denoise``: None, ``"auto"`` or a number above 0.

    Raises:
        UsageError: It is none of them.
    """
    if given is None or given == "auto":
        return given
    try:
        level = float(given)
    except (TypeError, ValueError):
        level = math.nan
    if not 0 < level <= 255:
        raise UsageError(
            f"--denoise {given} is neither auto nor a noise level above 0, up to 255",
            hint="--denoise auto, or --denoise 12",
        )
    return level
