"""Datasets of high-resolution images with their LQ versions, and random patches of such pairs.

LQ versions are files too, or a degradation makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import UsageError
from lowtide.media.image_info import ImageInfo
from lowtide.training.data.augment import Augmentation
from lowtide.training.data.image_cache import (
    FoundImage,
    ImageCache,
    ImageFolders,
    find_images,
    image_size_text,
    raise_problems,
    read_headers,
    require_same_size,
    to_unit_range,
    undersized_problems,
)

_FileKey = tuple[int, Path]
_PAIR_HINT = "each file of dataroot_gt needs one of dataroot_lq, named by filename_tmpl"

# Halo around a patch for the degradation, in GT pixels, and its minimum in LQ pixels: a blur's
# radius is up to 10, twice, of which the outer weights are small; a cubic filter's is 2 LQ pixels.
_HALO, _MIN_HALO = 24, 2

Degradation = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""Makes LQ (H / scale, W / scale, 3) of GT (H, W, 3), the scale and random numbers."""


class PairedImageFolders:
    """Dataset of GT folders and LQ folders, whose images are ``scale`` times smaller.

    Files are paired as in BasicSR: the first of ``gt`` belongs to the first of ``lq``, and so on;
    the LQ of ``a/b.png`` is in ``a/``, named ``filename_tmpl`` with ``b`` for its braces, with any
    image suffix.

    Raises:
        UsageError: For an unequal count of folders, or a template without braces.
        InputError: One for all files without an LQ file or with two, LQ files without a GT file,
            sizes that are not exactly ``scale`` times each other, damaged files, and files that
            are not 8 or 16-bit RGB.
    """

    def __init__(
        self,
        gt: Sequence[Path],
        lq: Sequence[Path],
        scale: int,
        filename_tmpl: str = "{}",
        *,
        cache: ImageCache | None = None,
    ) -> None:
        if len(gt) != len(lq):
            raise UsageError(
                f"{len(gt)} folders of GT and {len(lq)} of LQ cannot be paired",
                hint="dataroot_gt and dataroot_lq need the same number of folders, in order",
            )
        if filename_tmpl.count("{}") != 1:
            raise UsageError(
                f"filename_tmpl {filename_tmpl!r} must have exactly one '{{}}' for the name",
                hint="'{}x4' pairs baby.png with babyx4.png",
            )
        self.scale = scale
        self._cache = cache or ImageCache()
        matched, problems = _match(find_images(gt), find_images(lq), filename_tmpl)
        self._pairs, self._infos, wrong = _check_sizes(matched, scale)
        raise_problems(problems + wrong, _PAIR_HINT)

    def __len__(self) -> int:
        return len(self._pairs)

    def path(self, index: int) -> Path:
        """Return the GT file of a pair."""
        return self._pairs[index][0]

    def low_path(self, index: int) -> Path:
        """Return the LQ file of a pair."""
        return self._pairs[index][1]

    def files(self) -> list[Path]:
        """Return all GT and LQ files."""
        return [path for pair in self._pairs for path in pair]

    def check_patch_size(self, patch: int) -> None:
        """Raise `InputError` naming LQ files with a side below ``patch`` pixels."""
        paths = [low for _, low in self._pairs]
        infos = [low for _, low in self._infos]
        problems = undersized_problems(paths, infos, patch, "a patch")
        raise_problems(problems, "use a smaller lq_size, or remove them")

    def sample(
        self, index: int, patch: int, augmentation: Augmentation, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a random patch of a pair, LQ and GT as float32 (H, W, 3) in 0..1.

        Both are augmented alike. LQ has ``patch`` pixels on a side, GT ``patch * scale``. Raises
        `InputError` for files that are damaged or of another size than before.
        """
        high, low = (self._read(index, side) for side in (0, 1))
        top, left = (int(generator.integers(side - patch + 1)) for side in low.shape[:2])
        change = augmentation.draw(generator)
        cut: list[np.ndarray] = []
        for image, unit in ((low, 1), (high, self.scale)):
            rows = slice(top * unit, (top + patch) * unit)
            columns = slice(left * unit, (left + patch) * unit)
            cut.append(change.apply(to_unit_range(image[rows, columns])))
        return cut[0], cut[1]

    def _read(self, index: int, side: int) -> np.ndarray:
        path = self._pairs[index][side]
        return require_same_size(self._cache.read(path), self._infos[index][side], path)


def _match(
    gt: list[FoundImage], lq: list[FoundImage], template: str
) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Pair GT and LQ files; messages for files without a partner or with several."""
    low: dict[_FileKey, list[Path]] = {}
    for found in lq:
        low.setdefault((found.folder, found.stem), []).append(found.path)
    pairs: list[tuple[Path, Path]] = []
    problems: list[str] = []
    claimed: dict[_FileKey, Path] = {}
    for found in gt:
        name = found.stem.with_name(template.replace("{}", found.stem.name))
        partners = low.get((found.folder, name), [])
        first = claimed.setdefault((found.folder, name), found.path)
        if not partners:
            problems.append(f"{found.path}: has no LQ file {name}.*")
        elif len(partners) > 1:
            names = " and ".join(map(str, partners))
            problems.append(f"{found.path}: has {len(partners)} LQ files: {names}")
        elif first != found.path:
            problems.append(f"{found.path}: its LQ file {partners[0]} is also that of {first}")
        else:
            pairs.append((found.path, partners[0]))
    extra = [path for place, paths in low.items() if place not in claimed for path in paths]
    return pairs, problems + [f"{path}: has no GT file" for path in extra]


def _check_sizes(
    pairs: list[tuple[Path, Path]], scale: int
) -> tuple[list[tuple[Path, Path]], list[tuple[ImageInfo, ImageInfo]], list[str]]:
    """Return the valid pairs, their headers, and messages about the others."""
    headers = read_headers([path for pair in pairs for path in pair])
    good: list[tuple[Path, Path]] = []
    infos: list[tuple[ImageInfo, ImageInfo]] = []
    problems: list[str] = []
    for pair, high, low in zip(pairs, headers[::2], headers[1::2], strict=True):
        if isinstance(high, str) or isinstance(low, str):
            problems += [entry for entry in (high, low) if isinstance(entry, str)]
        elif (high.width, high.height) != (low.width * scale, low.height * scale):
            problems.append(
                f"{pair[0]}: {image_size_text(high)} is not {scale} times {pair[1]}: "
                f"{image_size_text(low)}"
            )
        else:
            good.append(pair)
            infos.append((high, low))
    return good, infos, problems


class HighResolutionFolders(ImageFolders):
    """Dataset of GT folders whose LQ patches are made by a degradation.

    ``degradation`` returns LQ ``scale`` times smaller than GT. A patch is cut with a halo,
    augmented, degraded, and cropped: filters see the pixels around it, mirrored at the image's
    borders. Raises one `InputError` for all files that are damaged or not 8 or 16-bit RGB.
    """

    def __init__(
        self,
        gt: Sequence[Path],
        scale: int,
        degradation: Degradation,
        *,
        cache: ImageCache | None = None,
    ) -> None:
        super().__init__(gt, cache=cache)
        self.scale = scale
        self._degradation = degradation
        self._halo = max(_MIN_HALO, math.ceil(_HALO / scale))

    def check_patch_size(self, patch: int) -> None:
        """Raise `InputError` naming files with a side below ``patch * scale`` pixels."""
        hint = "use a smaller lq_size, or remove them"
        self.require_sides(patch * self.scale, "a GT patch", hint)

    def sample(
        self, index: int, patch: int, augmentation: Augmentation, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a random GT patch with its degraded LQ, as float32 (H, W, 3) in 0..1.

        The order is LQ, GT. LQ has ``patch`` pixels on a side, GT ``patch * scale``. Patches begin
        at whole LQ pixels. Raises `InputError` for a file that is damaged or of another size than
        before.
        """
        padded = self._crop_with_halo(self.read(index), patch, generator)
        high = augmentation.draw(generator).apply(to_unit_range(padded))
        low = self._degradation(high, self.scale, generator)
        return _crop_halo(low, self._halo), _crop_halo(high, self._halo * self.scale)

    def _crop_with_halo(
        self, image: np.ndarray, patch: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Cut a random GT patch with its halo on all four sides."""
        halo, size = self._halo * self.scale, patch * self.scale
        spans: list[slice] = []
        missing: list[tuple[int, int]] = []
        for side in image.shape[:2]:
            # GT pixels beyond the last whole LQ pixel are dropped.
            side -= side % self.scale
            first = int(generator.integers((side - size) // self.scale + 1)) * self.scale - halo
            last = first + size + 2 * halo
            spans.append(slice(max(first, 0), min(last, side)))
            missing.append((max(-first, 0), max(last - side, 0)))
        return np.pad(image[spans[0], spans[1]], (*missing, (0, 0)), "symmetric")


def _crop_halo(image: np.ndarray, halo: int) -> np.ndarray:
    return image[halo : image.shape[0] - halo, halo : image.shape[1] - halo]


class PatchDataset(Protocol):
    """Interface of patch datasets: `PairedImageFolders` or `HighResolutionFolders`."""

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


class PatchSamples:
    """Samples of `BatchLoader`: patches of ``data``, ``patch`` LQ pixels on a side.

    Raises `UsageError` for a patch without pixels and `InputError` for images smaller than one.
    """

    def __init__(
        self, data: PatchDataset, patch: int, augmentation: Augmentation | None = None
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
