"""Each operator by bands against itself on the whole image, in double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.streaming.engine.program import FullTensorOp
from lowtide.streaming.engine.segments import cut_segments
from support.band_runs import Branches, check_parity, program_of


class Call(nn.Module):
    """A function of an image, with a convolution on both sides so that bands need neighbors."""

    def __init__(self, function, channels=8, made=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.last = nn.Conv2d(made or channels, 3, 3, padding=1)
        self.function = function
        self.inside = function if isinstance(function, nn.Module) else None

    def forward(self, image):
        return self.last(self.function(self.first(image)))


def windows(x, size=4, shift=0):
    """Attention within windows of ``size`` × ``size``, as Swin does, masked where it wraps."""
    _, channels, height, width = x.shape
    down, right = -height % size, -width % size
    x = F.pad(x, (0, right, 0, down), mode="reflect").permute(0, 2, 3, 1)
    high, wide = x.shape[1:3]
    mask = None
    if shift:
        x = torch.roll(x, (-shift, -shift), (1, 2))
        regions = torch.zeros(1, high, wide, 1, dtype=x.dtype)
        cuts = slice(0, -size), slice(-size, -shift), slice(-shift, None)
        for number, (rows, columns) in enumerate((a, b) for a in cuts for b in cuts):
            regions[:, rows, columns] = number
        flat = partition(regions, size).squeeze(-1)
        difference = flat[:, None] - flat[:, :, None]
        mask = torch.zeros_like(difference).masked_fill(difference != 0, -100.0)
    tokens = partition(x, size)
    scores = tokens @ tokens.transpose(-2, -1)
    scores = scores.softmax(-1) if mask is None else (scores + mask).softmax(-1)
    tokens = (scores @ tokens).view(1, high // size, wide // size, size, size, channels)
    x = tokens.permute(0, 1, 3, 2, 4, 5).reshape(1, high, wide, channels)
    if shift:
        x = torch.roll(x, (shift, shift), (1, 2))
    return x.permute(0, 3, 1, 2)[:, :, :height, :width]


def partition(x, size):
    _, high, wide, channels = x.shape
    x = x.view(1, high // size, size, wide // size, size, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, channels)


def overlapping(x):
    """Keys of larger windows by unfolding, as HAT does."""
    _, channels, height, width = x.shape
    down, right = -height % 4, -width % 4
    x = F.pad(x, (0, right, 0, down))
    query = partition(x.permute(0, 2, 3, 1), 4)
    seen = F.unfold(x, 6, stride=4, padding=1).view(1, channels, 36, -1)
    seen = seen.permute(0, 3, 2, 1).reshape(-1, 36, channels)
    found = (query @ seen.mT).softmax(-1) @ seen
    high, wide = x.shape[2:]
    found = found.view(1, high // 4, wide // 4, 4, 4, channels).permute(0, 5, 1, 3, 2, 4)
    return found.reshape(1, channels, high, wide)[:, :, :height, :width]


def between_channels(x):
    """Attention between channels: a sum over all pixels (Restormer, CRAFT)."""
    flat = F.normalize(x.flatten(2), dim=-1)
    return ((flat @ flat.mT).softmax(-1) @ x.flatten(2)).view_as(x)


def between_pixels(x):
    """Attention of every pixel to every pixel, spelled out."""
    tokens = x.flatten(2).mT
    return ((tokens @ tokens.mT * 0.3).softmax(-1) @ tokens).mT.reshape(x.shape)


def fused(x):
    tokens = x.flatten(2).mT[:, None]
    return F.scaled_dot_product_attention(tokens, tokens, tokens)[:, 0].mT.reshape(x.shape)


class Squeeze(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return x * self.inner(F.adaptive_avg_pool2d(x, 1)).sigmoid()


def statistics(x):
    mean, deviation = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True)
    spread = x.var(-1, keepdim=True, unbiased=False) + x.flatten(2).var(-1)[..., None, None]
    return (x - mean) / deviation + spread


def extremes(x):
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return (x - low) / (high - low) + x.sum(dim=(2, 3), keepdim=True) + x.amax(1, keepdim=True)


def mixed(x):
    a, b = x.chunk(2, 1)
    c, d = x.split([3, 5], 1)
    e = torch.stack(x[:, :4].unbind(1), 1)
    x = torch.cat([a * b.sigmoid(), e + 1], 1) + torch.cat([d, c], 1)
    y = x.clone()
    y[:, :3] = y[:, :3] * 2
    return torch.where(y > 0, y, x.exp() - 1).clamp(-3, 3)


CASES = {
    "strides": nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.Upsample(scale_factor=2)),
    "dilation": nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    "groups": nn.Conv2d(8, 8, 5, padding=2, groups=4, bias=False),
    "same": nn.Conv2d(8, 8, (5, 3), padding="same"),
    "tall": nn.Conv2d(8, 8, (7, 1), padding=(3, 0)),
    "valid": nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(8, 8, 5)),
    "circular": nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
    "replicate": nn.Conv2d(8, 8, 5, padding=2, padding_mode="replicate"),
    "transposed": nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1),
    "transposed, odd": nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1),
    "largest": nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)),
    "shuffle": nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(2, 8, 3, padding=1)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=3, mode="bicubic"),
    "repeated": lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3),
    "rolled": lambda x: torch.roll(x, (3, -2), (2, 3)) + torch.roll(x, -5, 2),
    "flipped": lambda x: x.flip(2) + x.flip((2, 3)) + x.flip(1),
    "cropped": lambda x: F.pad(x[:, :, 2:-1], (0, 0, 1, 2), value=0.5),
    "below": lambda x: torch.cat([x.flip(2), x, x[:, :, :3]], 2)[:, :, 5:],
    "group norm": nn.GroupNorm(4, 8),
    "instance norm": nn.InstanceNorm2d(8, affine=True),
    "batch norm": nn.BatchNorm2d(8),
    "layer norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2),
    "prelu": nn.Sequential(nn.PReLU(8), nn.GELU(), nn.SiLU(), nn.LeakyReLU(0.1)),
    "squeeze": Squeeze(),
    "statistics": statistics,
    "extremes": extremes,
    "mixed": mixed,
    "windows": windows,
    "shifted windows": lambda x: windows(windows(x), shift=2),
    "unmasked": lambda x: torch.roll(windows(torch.roll(x, 3, 2)), -3, 2),
    "overlapping windows": overlapping,
    "between channels": between_channels,
    "between pixels": between_pixels,
    "fused attention": fused,
}


@pytest.mark.parametrize("size", [(21, 18), (16, 24)])
def test_equals_the_whole(size):
    module = Branches(CASES).double()
    torch.manual_seed(1)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    image = torch.randn(1, 3, *size, dtype=torch.float64)
    check_parity(module, image, bands=(2, 7), share=1e-10)


def test_channels_to_pixels_and_back():
    module = nn.Sequential(
        nn.PixelUnshuffle(2),
        nn.Conv2d(12, 16, 3, padding=1),
        nn.PixelShuffle(2),
        nn.Conv2d(4, 3, 3, padding=1),
    ).double()
    check_parity(module, torch.randn(1, 3, 22, 14, dtype=torch.float64))


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(one, marks=pytest.mark.slow) for one in range(12, 40))]
)
def test_any_chain_at_any_size(seed):
    """Operators in a drawn order: what one leaves, the next must take."""
    draw = torch.Generator().manual_seed(seed)

    def pick(least, most):
        return int(torch.randint(least, most + 1, (), generator=draw))

    names = [
        name
        for name in CASES
        if name
        not in (
            "transposed",
            "transposed, odd",
            "nearest",
            "bilinear",
            "bicubic",
            "repeated",
            "below",
            "strides",
            "shuffle",
        )
    ]
    chosen = [CASES[names[pick(0, len(names) - 1)]] for _ in range(4)]

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(one for one in chosen if isinstance(one, nn.Module))

        def forward(self, x):
            for one in chosen:
                # Bounded, or errors would grow with the numbers.
                x = one(x).tanh() + 0.5 * x
            return x

    module = Call(Chain()).double()
    image = torch.randn(1, 3, pick(9, 40), pick(9, 30), dtype=torch.float64, generator=draw)
    check_parity(module, image, bands=(pick(1, 4), pick(5, 12)), parts=(1, pick(2, 8)), share=1e-9)


@pytest.mark.parametrize("style", ["normalized", "divided left", "times", "temperature"])
def test_scales_of_sums_wait_for_the_sums(style):
    """Attention between channels: queries and keys are never kept for their norms."""

    def attention(x):
        shape = x.shape
        q, k, v = (part.reshape(1, 2, 2, -1) for part in x.chunk(3, 1))
        if style == "normalized":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        elif style == "divided left":
            q = q / (1 + q.abs().amax(-1, keepdim=True))
        elif style == "times":
            k = k.mean(-1, keepdim=True) * k
        else:
            q = F.normalize(q, dim=-1) * 3.0
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        return (scores @ v).reshape(1, 4, *shape[2:])

    torch.manual_seed(0)
    image = torch.randn(1, 3, 23, 17, dtype=torch.float64)
    module = Call(attention, channels=12, made=4).double()
    check_parity(module, image)
    if style in ("normalized", "times"):
        program = program_of(module, image)
        places = {
            step.node.name: i for i, step in program.steps.items() if isinstance(step, FullTensorOp)
        }
        assert any("matmul" in name for name in places)
        # One sweep makes the sums, another what they weigh.
        assert len(cut_segments(program)) == 2
