"""Training images: found in folders, decoded to 8 or 16-bit RGB, cached in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from lowtide.core.errors import ImageError, InputError
from lowtide.core.input_file import exists, is_folder
from lowtide.media import inspect_image, open_image
from lowtide.media.discover import list_files
from lowtide.media.image_info import ImageInfo

CACHE_BYTES = 512 << 20
_RGB = 3
# Problems named in one message.
_MAX_NAMED = 5
# Threads; reading headers is bound by the disk, not by the CPU.
_HEADER_READERS = 8


def read_rgb(
    path: Path,
    *,
    gray: Literal["refuse", "convert"] = "refuse",
    alpha: Literal["refuse", "drop"] = "refuse",
) -> np.ndarray:
    """Decode an image file to upright RGB, uint8 or uint16 (H, W, 3).

    ``gray="convert"`` repeats the one channel of a gray image. ``alpha="drop"`` takes the colors
    without the alpha channel, not blended. Raises `ImageError` for gray or alpha otherwise, for
    float samples, and for a file that is missing, damaged or truncated.
    """
    with open_image(path) as source:
        info = source.info
        refused = unusable_reason(info, gray=gray == "refuse", alpha=alpha == "refuse")
        if refused is not None:
            raise ImageError(f"{path}: {refused}", hint="convert it to 8 or 16-bit RGB")
        rows = source.read(0, info.height)
    colors = rows[..., : info.color_channels]
    return np.ascontiguousarray(np.broadcast_to(colors, (*colors.shape[:2], _RGB)))


def unusable_reason(info: ImageInfo, *, gray: bool = True, alpha: bool = True) -> str | None:
    """Return why an image cannot be trained on, or None.

    ``gray`` and ``alpha`` say whether gray and an alpha channel are reasons.
    """
    if info.sample_type == "float32":
        return "its samples are 32-bit floats, and 8 or 16-bit integers are expected"
    if gray and info.color_channels != _RGB:
        return f"it is grayscale (channels: {info.channels}), and RGB is expected"
    if alpha and info.alpha:
        return f"it has an alpha channel (channels: {info.channels}), and RGB is expected"
    return None


def image_size(path: Path) -> tuple[int, int]:
    """Read height and width of the upright image from the header; raises `ImageError`."""
    info = inspect_image(path).info
    return info.height, info.width


def to_unit_range(pixels: np.ndarray) -> np.ndarray:
    """Convert uint8 or uint16 of any shape to float32 in 0..1.

    1 is the dtype's largest value.
    """
    return pixels.astype(np.float32) / np.float32(np.iinfo(pixels.dtype).max)


class ImageCache:
    """Thread-safe LRU cache of decoded images.

    It holds up to ``limit_bytes`` of pixels. A larger image is decoded each time. With
    ``any_colors`` gray images count as color, and alpha is dropped, instead of being refused.
    """

    def __init__(self, limit_bytes: int = CACHE_BYTES, *, any_colors: bool = False) -> None:
        self.limit_bytes, self._any_colors = limit_bytes, any_colors
        self.cached_bytes = 0
        self._images: OrderedDict[Path, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Path) -> np.ndarray:
        """Return `read_rgb` of the file, uint8 or uint16 (H, W, 3), as a read-only array.

        Raises as `read_rgb` does.
        """
        with self._lock:
            if path in self._images:
                self._images.move_to_end(path)
                return self._images[path]
        # Without the lock: two threads may decode the same file, but none waits for another.
        if self._any_colors:
            pixels = read_rgb(path, gray="convert", alpha="drop")
        else:
            pixels = read_rgb(path)
        pixels.flags.writeable = False
        with self._lock:
            self._insert(path, pixels)
        return pixels

    def _insert(self, path: Path, pixels: np.ndarray) -> None:
        if path in self._images or pixels.nbytes > self.limit_bytes:
            return
        self._images[path] = pixels
        self.cached_bytes += pixels.nbytes
        while self.cached_bytes > self.limit_bytes:
            self.cached_bytes -= self._images.popitem(last=False)[1].nbytes


@dataclass(frozen=True)
class FoundImage:
    """Image file found in a folder.

    ``stem`` is its path relative to the folder without the suffix, ``folder`` the folder's index.
    """

    path: Path
    stem: Path
    folder: int


def find_images(folders: Sequence[Path]) -> list[FoundImage]:
    """Find the images in folders and their subfolders.

    The order does not depend on the file system. Hidden files and folders are skipped. Raises
    `InputError` for a folder that does not exist or has no image.
    """
    found: list[FoundImage] = []
    for number, folder in enumerate(folders):
        if not is_folder(folder):
            what = "this is a file, not a folder" if exists(folder) else "no such folder"
            raise InputError(f"{folder}: {what}")
        found += [
            FoundImage(path, name.with_suffix(""), number) for path, name in list_files(folder)
        ]
    return found


def read_headers(paths: Sequence[Path], *, any_colors: bool = False) -> list[ImageInfo | str]:
    """Read the header of each file, in threads.

    For a file that cannot be trained on, the entry is a message that names it. With ``any_colors``
    gray and alpha are no reason.
    """
    with ThreadPoolExecutor(_HEADER_READERS) as readers:
        return list(readers.map(partial(_read_header, any_colors=any_colors), paths))


def _read_header(path: Path, *, any_colors: bool) -> ImageInfo | str:
    try:
        info = inspect_image(path).info
    except ImageError as error:
        return error.message
    refused = unusable_reason(info, gray=not any_colors, alpha=not any_colors)
    return info if refused is None else f"{path}: {refused}"


def raise_problems(problems: Sequence[str], hint: str) -> None:
    """Raise one `InputError` that counts the problems and lists the first few.

    Without problems it returns.
    """
    if not problems:
        return
    more = len(problems) - _MAX_NAMED
    listed = "\n".join(f"  {problem}" for problem in problems[:_MAX_NAMED])
    rest = f"\n  and {more:,} more" if more > 0 else ""
    count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
    raise InputError(f"{count} with the training images:\n{listed}{rest}", hint=hint)


def undersized_problems(
    paths: Sequence[Path], infos: Sequence[ImageInfo], min_side: int, requirement: str
) -> list[str]:
    """Return a message for each image with a side below ``min_side`` pixels.

    ``requirement`` names the thing that needs such a side.
    """
    return [
        f"{path}: {image_size_text(info)} is smaller than {requirement} of {min_side:,} x "
        f"{min_side:,}"
        for path, info in zip(paths, infos, strict=True)
        if min(info.width, info.height) < min_side
    ]


def require_same_size(pixels: np.ndarray, info: ImageInfo, path: Path) -> np.ndarray:
    """Return ``pixels`` (H, W, 3); `InputError` if the size is not that of ``info``."""
    height, width = pixels.shape[:2]
    if (height, width) != (info.height, info.width):
        raise InputError(
            f"{path}: {width:,} x {height:,} pixels, but {image_size_text(info)} when the run "
            "began",
            hint="do not change the training images during a run",
        )
    return pixels


def image_size_text(info: ImageInfo) -> str:
    """Format width and height for messages."""
    return f"{info.width:,} x {info.height:,} pixels"


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
