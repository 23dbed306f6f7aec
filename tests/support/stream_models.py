"""Small models whose streamed runs several tests compare with the whole run."""

import torch
import torch.nn.functional as F
from torch import nn


class Normed(nn.Module):
    """Convolutions with norms of the whole map between them."""

    def __init__(self, channels=24, depth=3):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, 1, 1)
            )
            for _ in range(depth)
        )
        self.last = nn.Conv2d(channels, 12, 3, padding=1)

    def forward(self, image):
        x = self.first(image)
        for block in self.blocks:
            x = x + block(x)
        return F.pixel_shuffle(self.last(x), 2)


def whole(model, image):
    with torch.no_grad():
        return model(image)


SIDE = 4


class Windows(nn.Module):
    """Shifted windows with a bias and a mask, as Swin's have them."""

    def __init__(self, channels=32, heads=2, shift=2, scale_last=False):
        super().__init__()
        torch.manual_seed(0)
        self.shift, self.heads, self.scale_last = shift, heads, scale_last
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.table = nn.Parameter(torch.randn(49, heads))
        self.register_buffer("index", torch.randint(0, 49, (SIDE**2, SIDE**2)))
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def mask(self, height, width, like):
        regions = like.new_zeros(1, height, width, 1)
        edges = (slice(0, -SIDE), slice(-SIDE, -self.shift), slice(-self.shift, None))
        for number, (rows, columns) in enumerate((a, b) for a in edges for b in edges):
            regions[:, rows, columns] = number
        flat = parted(regions).view(-1, SIDE**2)
        difference = flat.unsqueeze(1) - flat.unsqueeze(2)
        return difference.masked_fill(difference != 0, -100.0).masked_fill(difference == 0, 0.0)

    def forward(self, image):
        x = self.first(image).permute(0, 2, 3, 1)
        height, width, channels = x.shape[1:]
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        inner = parted(x).view(-1, SIDE**2, channels)
        windows = len(inner)
        q, k, v = self.qkv(inner).view(windows, SIDE**2, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        factor = q.shape[-1] ** -0.5
        if self.scale_last:
            scores = (q @ k.transpose(-2, -1)) * factor
        else:
            scores = (q * factor) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(SIDE**2, SIDE**2, -1).permute(2, 0, 1)
        scores = scores + bias.contiguous().unsqueeze(0)
        if self.shift:
            mask = self.mask(height, width, image).unsqueeze(1).unsqueeze(0)
            scores = scores.view(1, windows, self.heads, SIDE**2, SIDE**2) + mask
            scores = scores.view(-1, self.heads, SIDE**2, SIDE**2)
        found = (scores.softmax(-1) @ v).transpose(1, 2).reshape(windows, SIDE**2, channels)
        found = self.out(found).view(1, height // SIDE, width // SIDE, SIDE, SIDE, channels)
        x = found.permute(0, 1, 3, 2, 4, 5).reshape(1, height, width, channels)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return self.last(x.permute(0, 3, 1, 2))


def parted(x):
    _, height, width, channels = x.shape
    x = x.view(1, height // SIDE, SIDE, width // SIDE, SIDE, channels)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, SIDE, SIDE, channels)


class Between(nn.Module):
    """A function between two convolutions, the second of which needs rows around its own."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1).double()
        self.last = nn.Conv2d(8, 3, 5, padding=2).double()
        self.function = function

    def forward(self, image):
        return self.last(self.function(self.first(image)))
