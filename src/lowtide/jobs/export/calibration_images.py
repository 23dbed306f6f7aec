"""Calibration and evaluation crops of photographs for an int8 export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import ImageError, InputError
from lowtide.core.input_file import is_folder, require_input
from lowtide.media import open_image
from lowtide.media.discover import list_files
from lowtide.models.descriptor import SizeRule
from lowtide.models.loaded_model import Model

if TYPE_CHECKING:
    from torch import Tensor

# Number and side of calibration crops: as large as most receptive fields, and done in seconds.
_PIECES, _SIDE = 24, 128
# With fewer, the content of a single photograph decides the ranges or the measured error.
_MIN_PHOTOGRAPHS = 4


def find_photographs(paths: Sequence[Path | str]) -> list[Path]:
    """Return the image files among ``paths``, folders searched.

    Raises:
        InputError: A path does not exist.
        ImageError: A folder holds no images.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if is_folder(path):
            found += [image for image, _ in list_files(path)]
        else:
            require_input(path)
            found.append(path)
    return found


def photograph_notes(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return report notes on the photographs: too few for reliable figures."""
    if len(paths) >= _MIN_PHOTOGRAPHS:
        return ()
    one = len(paths) == 1
    return (
        f"int8 was calibrated and measured on only {len(paths)} photograph{'' if one else 's'}:"
        f" on others the loss may be larger; give --calibrate {_MIN_PHOTOGRAPHS} or more",
    )


def calibration_crops(paths: Sequence[Path], model: Model) -> list[Tensor]:
    """Return the crops to calibrate on, (1, C, H, W) in 0..1.

    They are taken from every other photograph, or from the upper half of the only one.
    """
    chosen = paths[::2]
    each = max(1, _PIECES // len(chosen))
    crops: list[Tensor] = []
    for path in chosen[:_PIECES]:
        crops += _crops(path, model, (_SIDE, _SIDE), each, half=_half(paths, 0))
    return crops


def evaluation_crops(
    paths: Sequence[Path], model: Model, sizes: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """Return crops of ``sizes`` of the photographs not used for calibration.

    ``sizes`` are (H, W); a crop is smaller where its photograph is. Crops are (1, C, H, W) in 0..1,
    and none is returned twice.
    """
    chosen = paths[1::2] or paths
    found: dict[tuple[Path, tuple[int, ...]], Tensor] = {}
    for place, size in enumerate(sizes):
        path = chosen[place % len(chosen)]
        (crop,) = _crops(path, model, size, 1, half=_half(paths, 1))
        found[path, tuple(crop.shape)] = crop
    return list(found.values())


def _half(paths: Sequence[Path], which: int) -> int | None:
    return which if len(paths) == 1 else None


def _crops(
    path: Path, model: Model, size: tuple[int, int], count: int, *, half: int | None
) -> list[Tensor]:
    """Return up to ``count`` adjacent crops of the middle of a photograph.

    ``half`` restricts them to the upper (0) or the lower (1) half.
    """
    facts = model.descriptor
    with open_image(path) as source:
        info = source.info
        first, rows = 0, info.height
        if half is not None:
            first, rows = half * (rows // 2), rows // 2
        height, width = _largest_allowed_size(
            (min(size[0], rows), min(size[1], info.width)), facts.size, path
        )
        top = first + (rows - height) // 2
        band = source.read(top, top + height)[..., : info.color_channels]
        band = band / np.float32(info.full_scale)
    band = _to_tensor(band.clip(0, 1), facts.in_channels, model)
    count = min(count, info.width // width)
    lefts = [(2 * place + 1) * info.width // (2 * count) - width // 2 for place in range(count)]
    return [band[..., left : left + width].contiguous() for left in lefts]


def _largest_allowed_size(size: tuple[int, int], rule: SizeRule, path: Path) -> tuple[int, int]:
    """Return the largest size up to ``size`` that the model's size rule allows."""
    height, width = (side // rule.multiple_of * rule.multiple_of for side in size)
    if rule.square:
        height = width = min(height, width)
    if min(height, width) < max(rule.minimum, 1):
        raise ImageError(
            f"{path}: too small to calibrate int8 on: crops of it are {size[1]}×{size[0]}, and the"
            f" model needs at least {max(rule.minimum, rule.multiple_of)} px",
            hint="give larger photographs, or more than one",
        )
    return height, width


def _to_tensor(image: np.ndarray, channels: int, model: Model) -> Tensor:
    """Convert (H, W, bands) in 0..1 to (1, C, H, W)."""
    import torch

    if channels not in (1, 3):
        raise InputError(
            f"{model.descriptor.name} takes {channels} channels, and photographs have 1 or 3",
            hint="--precision fp16",
        )
    if image.shape[-1] > channels:
        image = image.mean(-1, keepdims=True)
    image = np.broadcast_to(image, (*image.shape[:2], channels))
    return torch.from_numpy(np.array(image.transpose(2, 0, 1), np.float32, order="C"))[None]
