"""Settings of an upscaling job, validated."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from lowtide.core.errors import UsageError
from lowtide.core.option import Option
from lowtide.jobs.images.enlarge_settings import EnlargeSettings
from lowtide.jobs.images.settings import PLAN_PANEL
from lowtide.models.descriptor import Runtime


@dataclass(frozen=True, kw_only=True)
class UpscaleSettings(EnlargeSettings):
    """Settings of an upscaling job, except its files.

    The target size is one of ``scale``, ``width`` and/or ``height`` (one keeps the aspect ratio,
    both are taken as they are), or ``max_side``; none means the model's own scale.

    Attributes:
        model: A bundled model or a file (.safetensors, .pth, .ckpt, .onnx). Default: lowtide-x2, or
            lowtide-photo-x2 for pictures that are or were JPEGs of a quality up to 92; -x4 for a
            --scale above 2.
        runtime: What computes the model. ncnn, for bundled upscalers on the CPU, starts in a second
            and takes a sixth of the memory; results differ by 1 of 255 in one of 100,000 samples.
            auto: PyTorch, or ncnn where PyTorch is not installed.
    """

    runtime: Annotated[Literal["auto", "torch", "ncnn"], Option(PLAN_PANEL)] = "auto"

    hashed: ClassVar[str] = (
        "computed_by scale width height max_side denoise format precision accuracy strategy"
        " self_ensemble compile cuda_graphs provider tile tile_overlap tile_batch_size hann_blend"
        " strip_metadata"
        " png_compression jpeg_quality webp_quality webp_lossless avif_quality tiff_compression"
    )

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        needed = self._torch_needed_for
        if needed is None:
            return
        if self.runtime == "ncnn":
            raise UsageError(f"{needed} needs PyTorch", hint="--runtime torch, or drop it")
        if not _torch_is_here():
            raise UsageError(f"{needed} needs PyTorch", hint="pip install torch torchvision")

    @property
    def computed_by(self) -> Runtime:
        """The runtime that computes the model."""
        if self.runtime != "auto":
            return self.runtime
        return "torch" if _torch_is_here() else "ncnn"

    @property
    def _torch_needed_for(self) -> str | None:
        """What only PyTorch does of that which is asked for."""
        places = {self.device, *self.devices} - {"auto", "cpu"}
        asked = {
            f"--device {next(iter(places), '')}": bool(places),
            f"--precision {self.precision}": self.precision not in ("auto", "fp32"),
            "--compile on": self.compile == "on",
            "--cuda-graphs": self.cuda_graphs,
            "--strategy streamed": self.strategy == "streamed",
            "--self-ensemble": self.self_ensemble,
            "--denoise": self.denoise is not None,
        }
        return next((what for what, wanted in asked.items() if wanted), None)


def _torch_is_here() -> bool:
    return find_spec("torch") is not None
