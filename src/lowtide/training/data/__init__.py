"""Datasets of super-resolution training: random patch pairs from image folders.

`PairedFolders` reads both sides from files, `HighResolutionFolders` makes the low-resolution side
by `bicubic_downscale`, `PhotoDegradation` or `RealDegradation`. `Batches` returns the batch of any
step; the same step and seed give the same batch, so that training resumes exactly. LQ is the
low-resolution side and GT (ground truth) the high-resolution side, as in BasicSR.
"""

from __future__ import annotations

from lowtide.training.data.augment import Augmentation
from lowtide.training.data.batches import Batches, Samples
from lowtide.training.data.degrade import (
    PhotoConfig,
    PhotoDegradation,
    RealConfig,
    RealDegradation,
    StageConfig,
    bicubic_downscale,
)
from lowtide.training.data.file_facts import collect_file_facts
from lowtide.training.data.image_cache import ImageCache, image_size, read_rgb
from lowtide.training.data.kernels import BlurConfig
from lowtide.training.data.pairs import (
    Degradation,
    HighResolutionFolders,
    PairedFolders,
    PatchData,
    Patches,
)

__all__ = [
    "Augmentation",
    "Batches",
    "BlurConfig",
    "Degradation",
    "HighResolutionFolders",
    "ImageCache",
    "PairedFolders",
    "PatchData",
    "Patches",
    "PhotoConfig",
    "PhotoDegradation",
    "RealConfig",
    "RealDegradation",
    "Samples",
    "StageConfig",
    "bicubic_downscale",
    "collect_file_facts",
    "image_size",
    "read_rgb",
]
