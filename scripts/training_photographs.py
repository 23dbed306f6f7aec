"""What the bundled models are trained on: scikit-image's photographs, as random patch pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyvips
import torch
from torch import Tensor

from lowtide.core.metrics import psnr_y
from lowtide.models.resample import resize_cubic

# scikit-image's photographs with detail in them. Left out as nearly useless: retina, moon,
# clock_motion, color, cell (smooth or blurred), and everything that is no photograph.
PHOTOS = {
    "astronaut": "NASA, public domain",
    "brick": "CC0Textures, CC0",
    "chelsea": "Stefan van der Walt, CC0",
    "coins": "Brooklyn Museum, no known copyright restrictions",
    "grass": "linolafett, CC0",
    "gravel": "CC0Textures, CC0",
    "hubble_deep_field": "NASA, public domain",
    "ihc": "CMMI, no known copyright restrictions",
    "motorcycle_left": "Middlebury 2014 stereo benchmark (Scharstein et al., GCPR 2014)",
    "motorcycle_right": "the same benchmark",
    "rocket": "SpaceX, public domain",
}
TUNING = {"camera": "Lav Varshney, CC0", "coffee": "Rachel Michetti, CC0"}
SHRINK = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


def photograph(name: str) -> np.ndarray:
    """One of scikit-image's own files as uint8 (H, W, 3); gray ones have three equal bands."""
    import skimage.data
    from skimage.io import imread

    folder = Path(skimage.data.__file__).parent
    path = next(path for path in sorted(folder.glob(f"{name}.*")) if path.suffix != ".npz")
    image = imread(path)
    return np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image[..., :3]


def scaled(image: np.ndarray, share: float) -> np.ndarray:
    """A picture with sides of a share of its own."""
    return resize_cubic(image, *(round(side * share) for side in image.shape[:2]))


def shrink(high: np.ndarray, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """Low- and high-resolution picture, the latter cropped to whole low-resolution pixels."""
    height, width = high.shape[0] // scale, high.shape[1] // scale
    high = high[: height * scale, : width * scale]
    return resize_cubic(high, height, width), high


def bicubic(name: str, scale: int) -> float:
    """What cubic enlargement scores on a photograph that was made smaller, PSNR-Y in dB."""
    low, high = shrink(photograph(name), scale)
    return psnr_y(resize_cubic(low, *high.shape[:2]), high, scale)


def write(path: Path, image: np.ndarray) -> None:
    """As PNG, unless it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        pyvips.Image.new_from_array(np.ascontiguousarray(image)).pngsave(str(path))


def listed(sources: dict[str, str]) -> str:
    """Photographs and their sources, as a card lists them."""
    return "\n".join(f"- `{name}`: {source}" for name, source in sources.items())


class Patches:
    """Random batches of patch pairs, photographs drawn in proportion to their area."""

    def __init__(self, scale: int, patch: int, batch: int, generator: torch.Generator) -> None:
        self.scale, self.patch, self.batch, self.generator = scale, patch, batch, generator
        self.pairs = []
        for name in PHOTOS:
            photo = photograph(name)
            for factor in SHRINK:
                low, high = shrink(scaled(photo, factor), scale)
                self.pairs.append(
                    tuple(torch.from_numpy(side).permute(2, 0, 1) for side in (low, high))
                )
        self.areas = torch.tensor([float(low[0].numel()) for low, _ in self.pairs])

    def _whole(self, limit: int) -> int:
        return int(torch.randint(limit, (), generator=self.generator))

    def _pair(self, index: int) -> tuple[Tensor, Tensor]:
        """One patch pair in 0..1, turned and mirrored at random."""
        low, high = self.pairs[index]
        top = self._whole(low.shape[1] - self.patch + 1)
        left = self._whole(low.shape[2] - self.patch + 1)
        turns, mirrored = self._whole(4), self._whole(2)
        result = []
        for image, unit in ((low, 1), (high, self.scale)):
            size = self.patch * unit
            cut = image[:, top * unit : top * unit + size, left * unit : left * unit + size]
            cut = torch.rot90(cut, turns, (1, 2))
            result.append((cut.flip(2) if mirrored else cut).float() / 255.0)
        return result[0], result[1]

    def next(self) -> tuple[Tensor, Tensor]:
        """A batch (low, high); the first half has its colors mixed, weakened or inverted.

        With so few photographs that matters more than anything else. All three maps are
        affine and keep 0..1, so they commute with the downscale.
        """
        chosen = torch.multinomial(self.areas, self.batch, True, generator=self.generator)
        low, high = (
            torch.stack(side) for side in zip(*map(self._pair, chosen.tolist()), strict=True)
        )
        half = self.batch // 2
        mix = -torch.rand(half, 3, 3, generator=self.generator).clamp_min(1e-6).log()
        mix = mix / mix.sum(dim=2, keepdim=True)
        contrast = 0.4 + 0.6 * torch.rand(half, 1, 1, 1, generator=self.generator)
        offset = (1 - contrast) * torch.rand(half, 1, 1, 1, generator=self.generator)
        inverted = torch.randint(2, (half, 1, 1, 1), generator=self.generator)
        for image in (low, high):
            mixed = torch.einsum("bij,bjhw->bihw", mix, image[:half]) * contrast + offset
            image[:half] = torch.where(inverted == 1, 1 - mixed, mixed)
        return low.contiguous(memory_format=torch.channels_last), high
