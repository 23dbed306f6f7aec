"""Settings of an upscaling job, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.jobs.images.enlarge_settings import EnlargeSettings


@dataclass(frozen=True, kw_only=True)
class UpscaleSettings(EnlargeSettings):
    """Settings of an upscaling job, except its files.

    The target size is one of ``scale``, ``width`` and/or ``height`` (one keeps the aspect ratio,
    both are taken as they are), or ``max_side``; none means the model's own scale.

    Attributes:
        model: A bundled model or a file (.safetensors, .pth, .ckpt, .onnx). Default: lowtide-x2, or
            lowtide-photo-x2 for pictures that are or were JPEGs of a quality up to 92; -x4 for a
            --scale above 2.
    """

    hashed: ClassVar[str] = (
        "scale width height max_side denoise format precision accuracy strategy self_ensemble"
        " compile cuda_graphs provider tile tile_overlap tile_batch_size hann_blend strip_metadata"
        " png_compression jpeg_quality webp_quality webp_lossless avif_quality tiff_compression"
    )
