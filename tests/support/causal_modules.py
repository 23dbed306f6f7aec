"""A causal network over clips, as modules of its first and of later chunks with carried state."""

import torch
from torch import nn

CHANNELS = 16


class Later(nn.Module):
    """Two causal convolutions and an upsampling; both caches are state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv3d(3, CHANNELS, 3, padding=(0, 1, 1))
        self.second = nn.Conv3d(CHANNELS, 3, 3, padding=(0, 1, 1))

    def forward(self, chunk, one, two):
        seen = torch.cat([one, chunk], 2)
        inside = self.between(self.first(seen))
        seen_inside = torch.cat([two, inside], 2)
        return self.second(seen_inside), seen[:, :, -2:], seen_inside[:, :, -2:]

    def between(self, inside):
        """What is between the convolutions, frame by frame."""
        return inside.repeat_interleave(2, 3).repeat_interleave(2, 4).relu()


class LaterWithAttention(Later):
    """The same, with every pixel of a frame looking at every other one."""

    def between(self, inside):
        batch, channels, frames, height, width = inside.shape
        pixels = inside.permute(0, 2, 3, 4, 1).reshape(-1, 1, height * width, channels)
        seen = nn.functional.scaled_dot_product_attention(pixels, pixels, pixels)
        seen = seen.reshape(batch, frames, height, width, channels).permute(0, 4, 1, 2, 3)
        return super().between(inside + seen)


class First(nn.Module):
    """The same before any frame: all that was seen is zero."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def forward(self, chunk):
        _, _, _, height, width = chunk.shape
        one = chunk.new_zeros(1, 3, 2, height, width)
        return self.later(chunk, one, chunk.new_zeros(1, CHANNELS, 2, 2 * height, 2 * width))


def causal_modules(kind=Later):
    """The modules of the first and of later chunks."""
    later = kind().eval()
    return First(later).eval(), later


def whole_clip(later, clip):
    """All frames at once: causal padding is the state of the first frame."""
    pad = (0, 0, 0, 0, 2, 0)
    inside = later.between(later.first(nn.functional.pad(clip, pad)))
    return later.second(nn.functional.pad(inside, pad))
