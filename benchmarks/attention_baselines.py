"""What local windows are compared with: the published modules they replace, and plain forms.

`SeedHierarchical` and `SeedWindows` behave as the first ParagonSR2 modules with these names did,
written anew: one head with an eighth of the channels for query and key, scores divided by the root
of the number of tokens, overlapping parts faded. The result is the attention alone, without the
gate that began at zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.attention.spatial import LocalWindowAttention


class SeedAttention(nn.Module):
    """Attention over all pixels of what it is given, all scores at once."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Conv2d(channels, max(1, channels // 8), 1)
        self.key = nn.Conv2d(channels, max(1, channels // 8), 1)
        self.value = nn.Conv2d(channels, channels, 1)

    def attend(self, image: Tensor, queries: int) -> Tensor:
        """Attention over ``image``, ``queries`` pixels at a time."""
        query, key, value = (
            layer(image).flatten(2) for layer in (self.query, self.key, self.value)
        )
        tokens = query.shape[2]
        parts = []
        for first in range(0, tokens, queries):
            scores = query[:, :, first : first + queries].mT @ key
            parts.append(value @ (scores / tokens**0.5).softmax(-1).mT)
        return torch.cat(parts, 2).view_as(image)

    def in_parts(self, image: Tensor, side: int, shared: int) -> Tensor:
        """Overlapping parts of ``side`` pixels, each by itself, faded into each other."""
        height, width = image.shape[2:]
        total, weights = torch.zeros_like(image), torch.zeros_like(image)
        for top in range(0, (height + shared - 1) // (side - shared)):
            for left in range(0, (width + shared - 1) // (side - shared)):
                rows = slice(top * (side - shared), min(height, top * (side - shared) + side))
                columns = slice(left * (side - shared), min(width, left * (side - shared) + side))
                found = self.attend_part(image[:, :, rows, columns])
                weight = torch.ones_like(found)
                for dim, part, length in ((2, rows, height), (3, columns, width)):
                    fade = min(shared, found.shape[dim] // 4)
                    shape = (-1, 1) if dim == 2 else (-1,)
                    if part.start > 0:
                        weight.narrow(dim, 0, fade).mul_(torch.linspace(0, 1, fade).view(shape))
                    if part.stop < length:
                        last = weight.narrow(dim, found.shape[dim] - fade, fade)
                        last.mul_(torch.linspace(1, 0, fade).view(shape))
                total[:, :, rows, columns] += weight * found
                weights[:, :, rows, columns] += weight
        return total / (weights + 1e-8)

    def attend_part(self, image: Tensor) -> Tensor:
        """Attention within one part."""
        return self.attend(image, image.shape[2] * image.shape[3])


class SeedHierarchical(SeedAttention):
    """Whole up to 2048 pixels, 256 queries at a time up to 16,384, parts of 64 px above."""

    def __init__(self, channels: int, *, most_chunked: int = 16384) -> None:
        super().__init__(channels)
        self.most_chunked = most_chunked

    def forward(self, image: Tensor) -> Tensor:
        """The result of the stage for this size."""
        tokens = image.shape[2] * image.shape[3]
        if tokens <= 2048:
            return self.attend(image, tokens)
        if tokens <= self.most_chunked:
            return self.attend(image, min(256, tokens // 8))
        return self.in_parts(image, 64, 8)

    def attend_part(self, image: Tensor) -> Tensor:
        """Attention within one part, in chunks."""
        tokens = image.shape[2] * image.shape[3]
        return self.attend(image, min(256, tokens // 8))


class SeedWindows(SeedAttention):
    """Windows of 32 px that share 8, one after another."""

    def forward(self, image: Tensor) -> Tensor:
        """The result; for a third of all sizes without the last rows and columns."""
        return self.in_parts(image, 32, 8)


class Unfolded(nn.Module):
    """The same windows as a `LocalWindowAttention`: all cut out at once, then one call of SDPA.

    Keys beyond the image are zeros without a mask, which is less than what the module does.
    """

    def __init__(self, module: LocalWindowAttention) -> None:
        super().__init__()
        self.module = module

    def forward(self, image: Tensor) -> Tensor:
        """The attention of every window, put together."""
        module, windows = self.module, self.module.windows
        batch, channels, height, width = image.shape
        step, size, margin = windows.stride, windows.size, windows.halo
        down, right = (windows.count(side, 0) for side in (height, width))
        found = module.qkv(image.permute(0, 2, 3, 1))
        below, padded_right = down * step + size - height, right * step + size - width
        found = F.pad(found, (0, 0, margin, padded_right, margin, below))
        query, key, value = found.unflatten(-1, (3, channels)).unbind(3)

        def cut(tensor: Tensor, first: int, side: int) -> Tensor:
            tensor = tensor[:, first:, first:]
            tensor = tensor.unfold(1, side, step)[:, :down].unfold(2, side, step)[:, :, :right]
            tokens = tensor.permute(0, 1, 2, 4, 5, 3).reshape(-1, side * side, channels)
            return tokens.unflatten(-1, (module.heads, -1)).transpose(1, 2)

        side = windows.query_size
        query = cut(query, margin, side)
        attended = F.scaled_dot_product_attention(query, cut(key, 0, size), cut(value, 0, size))
        attended = attended.transpose(1, 2).reshape(batch, down, right, side, side, channels)
        return module.out(self._joined(attended, height, width)).permute(0, 3, 1, 2)

    def _joined(self, attended: Tensor, height: int, width: int) -> Tensor:
        """(batch, height, width, channels) of windows, blended by F.fold where they overlap."""
        batch, down, right, side, _, channels = attended.shape
        step = self.module.windows.stride
        if step == side:
            rows = attended.permute(0, 1, 3, 2, 4, 5).reshape(batch, down * step, -1, channels)
            return rows[:, :height, :width]
        shared = side - step
        ramp = torch.arange(side) + 0.5
        taper = (torch.minimum(ramp, side - ramp) / shared).clamp_max(1)
        weight = taper[:, None] * taper
        flat = (attended * weight[:, :, None]).permute(0, 5, 3, 4, 1, 2)
        flat = flat.reshape(batch, channels * side * side, down * right)
        size = (down - 1) * step + side, (right - 1) * step + side
        total = F.fold(flat, size, side, stride=step)
        weights = weight.reshape(1, -1, 1).expand(1, -1, down * right)
        total = total / F.fold(weights, size, side, stride=step)
        return total[:, :, :height, :width].permute(0, 2, 3, 1)


class Whole(nn.Module):
    """Attention over the whole image with a module's own projections.

    ``how`` is ``"sdpa"``, ``"chunked"`` (256 queries at a time) or ``"materialized"``.
    """

    def __init__(self, module: LocalWindowAttention, how: str) -> None:
        super().__init__()
        self.module, self.how = module, how

    def forward(self, image: Tensor) -> Tensor:
        """Every pixel attends to every pixel."""
        found = self.module.qkv(image.permute(0, 2, 3, 1)).flatten(1, 2)
        found = found.unflatten(-1, (3, self.module.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = found.unbind(0)
        if self.how == "materialized":
            scores = query @ key.mT * query.shape[-1] ** -0.5
            result = scores.softmax(-1) @ value
        else:
            size = 256 if self.how == "chunked" else query.shape[2]
            result = torch.cat(
                [F.scaled_dot_product_attention(part, key, value) for part in query.split(size, 2)],
                2,
            )
        result = self.module.out(result.transpose(1, 2).flatten(2))
        return result.transpose(1, 2).reshape(image.shape)
