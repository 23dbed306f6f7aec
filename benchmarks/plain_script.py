"""What a user of spandrel writes: one picture through one model file, with PyTorch alone.

    python benchmarks/plain_script.py INPUT OUTPUT MODEL whole|tiles

Tiles are 256 pixels with 10 of context, and the network is channels-last.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from padded_tiles import padded_tiles
from PIL import Image
from spandrel import ImageModelDescriptor, ModelLoader

TILE, PAD = 256, 10


@torch.inference_mode()
def main(source: str, target: str, weights: str, way: str) -> None:
    """Read, run and write."""
    model = ModelLoader(device="cpu").load_from_file(weights).eval()
    assert isinstance(model, ImageModelDescriptor)
    model.model.to(memory_format=torch.channels_last)
    pixels = np.asarray(Image.open(source).convert("RGB"), np.float32) / 255
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    image = image.contiguous(memory_format=torch.channels_last)
    if way == "whole":
        result = model(image)
    else:
        result = padded_tiles(model.model, image, model.scale, TILE, PAD)
    samples = (result[0].clamp_(0, 1).permute(1, 2, 0).numpy() * 255).round()
    Image.fromarray(samples.astype(np.uint8)).save(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
