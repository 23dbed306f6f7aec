"""Dataset of paired files, high-resolution images and their LQ versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.media.image_info import ImageInfo
from lowtide.training.data.augment import Augmentation
from lowtide.training.data.image_cache import (
    FoundImage,
    ImageCache,
    find_images,
    raise_problems,
    read_headers,
    require_same_size,
    size_text,
    undersized_problems,
    unit_range,
)

_FileKey = tuple[int, Path]
_PAIR_HINT = "each file of dataroot_gt needs one of dataroot_lq, named by filename_tmpl"


class PairedFolders:
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
            cut.append(change.apply(unit_range(image[rows, columns])))
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
                f"{pair[0]}: {size_text(high)} is not {scale} times {pair[1]}: {size_text(low)}"
            )
        else:
            good.append(pair)
            infos.append((high, low))
    return good, infos, problems
