"""The usual loop: padded tiles one at a time, and a hard crop."""

from __future__ import annotations

from torch import Tensor, nn


def padded_tiles(model: nn.Module, image: Tensor, scale: int, tile: int, pad: int) -> Tensor:
    """The result for (1, channels, height, width), of tiles with ``pad`` pixels of context.

    Written from the published description of Real-ESRGAN's tiling.
    """
    _, channels, height, width = image.shape
    result = image.new_zeros(1, channels, height * scale, width * scale)
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            bottom, right = min(top + tile, height), min(left + tile, width)
            y, x = max(top - pad, 0), max(left - pad, 0)
            made_of = image[..., y : min(bottom + pad, height), x : min(right + pad, width)]
            rows = slice((top - y) * scale, (bottom - y) * scale)
            columns = slice((left - x) * scale, (right - x) * scale)
            place = slice(top * scale, bottom * scale), slice(left * scale, right * scale)
            result[..., place[0], place[1]] = model(made_of)[..., rows, columns]
    return result
