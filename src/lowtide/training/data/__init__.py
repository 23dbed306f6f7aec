"""What super-resolution networks are trained on: patches of pictures, in pairs.

`PairedFolders` has both sides in files, `HighResolutionFolders` makes the low-resolution side by
`bicubic_downscale` or `RealDegradation`. `Batches` gives the batch of any step; the same step of
the same seed is the same batch, so that training goes on where it stopped. LQ stands for the
low-resolution side and GT (ground truth) for the other, as in BasicSR.
"""

from __future__ import annotations

from lowtide.training.data.augment import Augmentation
from lowtide.training.data.batches import Batches, PatchData
from lowtide.training.data.degrade import (
    RealConfig,
    RealDegradation,
    StageConfig,
    bicubic_downscale,
)
from lowtide.training.data.file_facts import collect_file_facts
from lowtide.training.data.high_resolution import Degradation, HighResolutionFolders
from lowtide.training.data.image_cache import ImageCache, read_rgb, size_of
from lowtide.training.data.kernels import BlurConfig
from lowtide.training.data.pairs import PairedFolders

__all__ = [
    "Augmentation",
    "Batches",
    "BlurConfig",
    "Degradation",
    "HighResolutionFolders",
    "ImageCache",
    "PairedFolders",
    "PatchData",
    "RealConfig",
    "RealDegradation",
    "StageConfig",
    "bicubic_downscale",
    "collect_file_facts",
    "read_rgb",
    "size_of",
]
