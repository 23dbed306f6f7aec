"""Large photographs for benchmarks, made from the example: mirrored copies side by side.

Every region has a photograph's detail, unlike an enlargement, and any size can be had.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyvips

EXAMPLE = Path(__file__).parent.parent / "examples" / "coffee.jpg"


def photograph(path: Path, width: int, height: int) -> Path:
    """Write a baseline JPEG (or what the suffix says) of that size to ``path``."""
    image = pyvips.Image.new_from_file(str(EXAMPLE)).copy_memory()
    mirrored = image.join(image.fliphor(), "horizontal")
    cell = mirrored.join(mirrored.flipver(), "vertical")
    sheet = cell.replicate(-(-width // cell.width), -(-height // cell.height))
    sheet.crop(0, 0, width, height).write_to_file(str(path))
    return path


def as_array(path: Path) -> np.ndarray:
    """The whole image, (height, width, 3), as its file is now, which libvips keeps by its name."""
    return pyvips.Image.new_from_file(str(path), revalidate=True).numpy()
