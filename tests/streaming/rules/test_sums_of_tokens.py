"""Sums of pixels and tokens, whatever their memory format."""

import pytest
import torch
from torch import nn

from support.band_runs import check_parity


class Blocks(nn.Module):
    """As SwinIR has them: tokens through norms and products, then a convolution around them."""

    def __init__(self, channels=6, blocks=2, groups=2):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(blocks * groups))
        self.inner = nn.ModuleList(nn.Linear(channels, channels) for _ in range(blocks * groups))
        self.around = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1) for _ in range(groups)
        )
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, image):
        height, width = image.shape[2:]
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)
        layers = list(zip(self.norms, self.inner, strict=True))
        for group, around in enumerate(self.around):
            kept = tokens
            each = len(layers) // len(self.around)
            for norm, inner in layers[group * each : (group + 1) * each]:
                tokens = tokens + inner(norm(tokens))
            map_ = tokens.transpose(1, 2).view(1, -1, height, width)
            tokens = around(map_).flatten(2).transpose(1, 2) + kept
        return self.last(tokens.transpose(1, 2).view(1, -1, height, width) + x)


class Parallel(Blocks):
    """As HAT has them: two convolutions of the normalized tokens, parallel to each inner layer."""

    def __init__(self):
        super().__init__()
        self.parallel = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 6, 3, padding=1))
            for _ in self.norms
        )

    def forward(self, image):
        height, width = image.shape[2:]
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)
        for norm, inner, parallel in zip(self.norms, self.inner, self.parallel, strict=True):
            normed = norm(tokens)
            pixels = parallel(normed.view(1, height, width, -1).permute(0, 3, 1, 2))
            near = pixels.permute(0, 2, 3, 1).contiguous().view(tokens.shape)
            tokens = tokens + inner(normed) + near
        return self.last(tokens.transpose(1, 2).view(1, -1, height, width) + x)


@pytest.mark.parametrize("kind", [Blocks, Parallel])
@pytest.mark.parametrize("size", [(24, 10), (31, 13)])
def test_they_give_the_same_values(size, kind):
    check_parity(kind().double(), torch.rand(1, 3, *size, dtype=torch.float64))
