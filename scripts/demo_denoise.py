"""Write a photograph out of scikit-image, clean and with noise: `make demo-denoise` removes it.

    python scripts/demo_denoise.py demo/denoise

Gaussian noise of a sigma of 25, clipped and rounded to 8 bits as in any file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyvips
from training_photographs import photograph

from lowtide.core.philox import philox_generator

SIGMA = 25


def main() -> None:
    """Write ``clean.png`` and ``noisy.png`` into the folder that is given."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    clean = photograph("coffee")
    noise = SIGMA * philox_generator(0, 0, 0, 0).standard_normal(clean.shape)
    noisy = np.rint((clean + noise).clip(0, 255)).astype(np.uint8)
    for name, image in (("clean", clean), ("noisy", noisy)):
        pyvips.Image.new_from_array(image).pngsave(str(folder / f"{name}.png"))


if __name__ == "__main__":
    main()
