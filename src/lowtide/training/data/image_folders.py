"""Folders of images that samples are cut from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowtide.media.image_info import ImageInfo
from lowtide.training.data.image_cache import (
    ImageCache,
    find_images,
    raise_problems,
    read_headers,
    require_same_size,
    undersized_problems,
)


class ImageFolders:
    """Images of folders and their subfolders, whose headers were read.

    Args:
        folders: Searched as by `find_images`.
        cache: Of the decoded images.
        any_colors: Take gray images, and those with alpha, too.

    Raises one `InputError` for all files that are damaged or not of 8 or 16 bits.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        cache: ImageCache | None = None,
        any_colors: bool = False,
    ) -> None:
        self._cache = cache or ImageCache(any_colors=any_colors)
        self._paths = [found.path for found in find_images(folders)]
        headers = read_headers(self._paths, any_colors=any_colors)
        raise_problems(
            [entry for entry in headers if isinstance(entry, str)], "repair or remove them"
        )
        self._infos = [info for info in headers if isinstance(info, ImageInfo)]

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self._paths[index]

    def files(self) -> list[Path]:
        """Return all image files."""
        return list(self._paths)

    def read(self, index: int) -> np.ndarray:
        """Return an image, uint8 or uint16 (H, W, 3).

        Raises `InputError` for a file that is damaged or of another size than before.
        """
        path = self._paths[index]
        return require_same_size(self._cache.read(path), self._infos[index], path)

    def require_sides(self, least: int, requirement: str, hint: str) -> None:
        """Raise `InputError` naming files with a side below ``least`` pixels."""
        problems = undersized_problems(self._paths, self._infos, least, requirement)
        raise_problems(problems, hint)
