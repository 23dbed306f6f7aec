"""What super-resolution networks are trained on: patches of pictures, in pairs.

`PairedFolders` has both sides in files, `HighResolutionFolders` makes the low-resolution side by
`bicubic` or `RealDegradation`. `Batches` gives the batch of any step; the same step of the same
seed is the same batch, so that training goes on where it stopped. LQ stands for the
low-resolution side and GT (ground truth) for the other, as in BasicSR.
"""

from __future__ import annotations

from lowtide.training.data.augment import Augmentation
from lowtide.training.data.batches import Batches, PatchData
from lowtide.training.data.degrade import RealConfig, RealDegradation, StageConfig, bicubic
from lowtide.training.data.files import file_facts
from lowtide.training.data.images import ImageCache, read_rgb, size_of
from lowtide.training.data.kernels import BlurConfig
from lowtide.training.data.pairs import PairedFolders
from lowtide.training.data.single import Degradation, HighResolutionFolders

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
    "bicubic",
    "file_facts",
    "read_rgb",
    "size_of",
]
