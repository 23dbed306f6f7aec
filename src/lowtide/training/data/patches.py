"""Random augmented patches of image pairs, as samples of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import UsageError
from lowtide.training.data.augment import Augmentation


class PatchData(Protocol):
    """Interface of patch datasets: `PairedFolders` or `HighResolutionFolders`."""

    scale: int

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def path(self, index: int) -> Path:
        """Return the file of an image, for messages."""
        ...

    def check_patch_size(self, patch: int) -> None:
        """Raise `InputError` for images smaller than a patch of ``patch`` LQ pixels."""
        ...

    def sample(
        self, index: int, patch: int, augmentation: Augmentation, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a random augmented patch, LQ and GT as float32 (H, W, 3) in 0..1.

        Raises `InputError` for a damaged file.
        """
        ...


class Patches:
    """Samples of `Batches`: patches of ``data``, ``patch`` LQ pixels on a side.

    Raises `UsageError` for a patch without pixels and `InputError` for images smaller than one.
    """

    def __init__(
        self, data: PatchData, patch: int, augmentation: Augmentation | None = None
    ) -> None:
        if patch < 1:
            raise UsageError(f"patch must be 1 or more: {patch}")
        data.check_patch_size(patch)
        self.data, self.patch = data, patch
        self._augmentation = augmentation or Augmentation()

    def __len__(self) -> int:
        return len(self.data)

    def path(self, index: int) -> Path:
        """Return the file of an image, for messages."""
        return self.data.path(index)

    def sample(self, index: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return LQ (3, patch, patch) and GT (3, patch * scale, patch * scale) in 0..1."""
        low, high = self.data.sample(index, self.patch, self._augmentation, generator)
        return low.transpose(2, 0, 1), high.transpose(2, 0, 1)

    def example(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return LQ (B, 3, H, W) and GT (B, 3, H * scale, W * scale) as meta tensors."""
        low, high = (
            torch.empty(batch, 3, side, side, device="meta")
            for side in (self.patch, self.patch * self.data.scale)
        )
        return low, high
