"""Will it train on an 8 GB card? Two models given as Python objects, and what would make them fit.

    python examples/plan_training.py

Nothing is trained and no GPU is needed; it takes about a minute. Any function that returns a
module can be planned by its place, too:

    lowtide plan train examples/plan_training.py:unet --size 128 --batch 8 --device rtx3070-8gb
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.jobs.train.plan import plan_training


class Residual(nn.Module):
    """Two convolutions, the noise level added between them."""

    def __init__(self, width: int, out: int, levels: int) -> None:
        super().__init__()
        self.norm, self.again = nn.GroupNorm(8, width), nn.GroupNorm(8, out)
        self.first = nn.Conv2d(width, out, 3, padding=1)
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.level = nn.Linear(levels, out)
        self.skip = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """(B, width, H, W) and (B, levels) to (B, out, H, W)."""
        y = self.first(F.silu(self.norm(x))) + self.level(F.silu(level))[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.again(y)))


class Attention(nn.Module):
    """Self-attention of (B, tokens, width) with heads of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, tokens, width) to the same."""
        batch, tokens, width = x.shape
        q, k, v = self.into(x).view(batch, tokens, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Stage(nn.Module):
    """A residual block, and attention where the resolution allows it."""

    def __init__(self, width: int, out: int, levels: int, *, attend: bool) -> None:
        super().__init__()
        self.block = Residual(width, out, levels)
        self.norm = nn.GroupNorm(8, out) if attend else None
        self.attend = Attention(out) if attend else None

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """(B, width, H, W) and (B, levels) to (B, out, H, W)."""
        x = self.block(x, level)
        if self.norm is None or self.attend is None:
            return x
        tokens = self.attend(self.norm(x).flatten(2).transpose(1, 2))
        return x + tokens.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """A small diffusion U-Net: images and their noise levels in, the noise out."""

    def __init__(self, width: int = 128, channels: int = 3) -> None:
        super().__init__()
        widths, levels = (width, 2 * width, 2 * width, 4 * width), 4 * width
        self.width = width
        self.level = nn.Sequential(nn.Linear(width, levels), nn.SiLU(), nn.Linear(levels, levels))
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        sizes = list(zip((width, *widths), widths, strict=False))
        self.down = nn.ModuleList(
            [Stage(a, b, levels, attend=depth > 1) for depth, (a, b) in enumerate(sizes)]
        )
        self.up = nn.ModuleList(
            [Stage(2 * b, a, levels, attend=depth > 1) for depth, (a, b) in enumerate(sizes)][::-1]
        )
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        """(B, channels, H, W), sides multiples of 8, and (B,) to (B, channels, H, W)."""
        level = self.level(waves(time, self.width))
        x, kept = self.first(image), []
        for depth, stage in enumerate(self.down):
            x = stage(F.avg_pool2d(x, 2) if depth else x, level)
            kept.append(x)
        for depth, stage in enumerate(self.up):
            x = F.interpolate(x, scale_factor=2.0) if depth else x
            x = stage(torch.cat([x, kept.pop()], 1), level)
        return self.last(F.silu(x))

    def example_inputs(self, batch: int, size: tuple[int, int]) -> tuple[Tensor, ...]:
        """What `forward` takes, for the planner; tensors without data will do."""
        return torch.empty(batch, 3, *size, device="meta"), torch.empty(batch, device="meta")


class Block(nn.Module):
    """Attention and a perceptron, scaled and shifted by the noise level (Peebles & Xie, 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in "ab"])
        self.attend = Attention(width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.level = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """(B, tokens, width) and (B, width) to (B, tokens, width)."""
        a, b, c, d, e, f = self.level(F.silu(level))[:, None].chunk(6, dim=-1)
        x = x + c * self.attend(self.norms[0](x) * (1 + a) + b)
        return x + f * self.think(self.norms[1](x) * (1 + d) + e)


class DiT(nn.Module):
    """A diffusion transformer on latents with patches of 2."""

    def __init__(self, width: int = 768, depth: int = 12, channels: int = 4) -> None:
        super().__init__()
        self.width, self.channels = width, channels
        self.patches = nn.Conv2d(channels, width, 2, stride=2)
        self.level = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 4 * channels)

    def forward(self, latent: Tensor, time: Tensor) -> Tensor:
        """(B, channels, H, W) with even sides and (B,) to (B, channels, H, W)."""
        x = self.patches(latent)
        rows, columns = x.shape[2:]
        x, level = x.flatten(2).transpose(1, 2), self.level(waves(time, 256))
        for block in self.blocks:
            x = block(x, level)
        x = self.last(x).transpose(1, 2).unflatten(2, (rows, columns))
        return F.pixel_shuffle(x, 2)

    def example_inputs(self, batch: int, size: tuple[int, int]) -> tuple[Tensor, ...]:
        """Latents of images of ``size``, an eighth as wide and high, and noise levels."""
        height, width = (side // 8 for side in size)
        latent = torch.empty(batch, self.channels, height, width, device="meta")
        return latent, torch.empty(batch, device="meta")


def waves(time: Tensor, width: int) -> Tensor:
    """Sines and cosines of (B,) numbers, (B, width)."""
    rates = torch.exp(-9.2 * torch.arange(width // 2, device=time.device) / (width // 2))
    angles = time[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def unet() -> nn.Module:
    """The U-Net, 16 million weights."""
    return UNet()


def dit() -> nn.Module:
    """The transformer, 128 million weights."""
    return DiT()


def main() -> None:
    """Both models on a card of 8 GB."""
    for name, model, batch, size in (("U-Net", unet(), 32, 128), ("DiT", dit(), 32, 512)):
        plan = plan_training(model, batch=batch, size=(size, size), device="rtx3070-8gb", ema=True)
        print(f"{name}, {batch} images of {size}×{size}\n{plan}\n")


if __name__ == "__main__":
    main()
