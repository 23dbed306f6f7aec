"""Each operator in 1D, 2D and 3D by bands along any axis against the whole, in double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.band_runs import check_parity

# Odd sizes: (B, C, L), (B, C, H, W), (B, C, D, H, W).
SIDES = {1: (37,), 2: (19, 11), 3: (13, 9, 7)}


def layer(kind, rank, *args, **options):
    return getattr(nn, f"{kind}{rank}d")(*args, **options)


class Layers(nn.Module):
    """Each layer between two convolutions, so that bands need neighbors."""

    def __init__(self, layers, rank):
        super().__init__()
        torch.manual_seed(0)
        self.first = layer("Conv", rank, 3, 8, 3, padding=1)
        self.last = nn.ModuleList(layer("Conv", rank, 8, 3, 3, padding=1) for _ in layers)
        self.layers = layers
        self.inside = nn.ModuleList(one for one in layers.values() if isinstance(one, nn.Module))

    def forward(self, x):
        x = self.first(x)
        pairs = zip(self.layers.items(), self.last, strict=True)
        return {name: last(function(x)) for (name, function), last in pairs}


def causal(rank, axis, mode="constant"):
    """A convolution that sees earlier places along ``axis`` only, as those of video VAEs."""
    torch.manual_seed(1)
    conv = layer("Conv", rank, 8, 8, 3, padding=tuple(int(at != axis - 2) for at in range(rank)))
    pad = [0] * (2 * rank)
    pad[2 * (rank - 1 - (axis - 2))] = 2

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, x):
            return self.conv(F.pad(x, pad, mode=mode))

    return Causal()


def shuffled(x, axis):
    """Channels become places along ``axis``, as in temporal upsampling."""
    parts = x.unflatten(1, (2, -1)).movedim(1, axis + 1)
    return parts.flatten(axis, axis + 1)


def doubled_but_first(x, axis):
    """All places but the first are doubled along ``axis``, as video decoders do."""
    first, rest = x.split([1, x.shape[axis] - 1], axis)
    return torch.cat([first, rest.repeat_interleave(2, axis)], axis)


def selected_apart(x, axis):
    """The first places go other ways, as frames of images do in video autoencoders."""
    second, rest = x.narrow(axis, 1, 1), x.narrow(axis, 2, x.shape[axis] - 2)
    alone = torch.tanh(x.select(axis, 0)), torch.sigmoid(second.squeeze(axis))
    return torch.cat([*(one.unsqueeze(axis) for one in alone), rest], axis)


def after_others(x, axis):
    """Some places come before, from a cache or from the first one."""
    times = [3 if dim == axis else 1 for dim in range(x.dim())]
    cache = torch.linspace(0, 1, 2, dtype=x.dtype).view([2 if time > 1 else 1 for time in times])
    cache = cache.expand([2 if dim == axis else side for dim, side in enumerate(x.shape)])
    return torch.concat([cache, x.narrow(axis, 0, 1).repeat(times), x], axis) * 2


def every_third(x, axis):
    return x.movedim(axis, 0)[1::3].movedim(0, axis)


def attended(x, axis, **more):
    """Attention of places along ``axis`` to each other, and maybe only to earlier ones."""
    places = x.movedim((1, axis), (-1, -2))
    if more.get("attn_mask"):
        more["attn_mask"] = torch.eye(x.shape[axis], dtype=x.dtype).cumsum(0).log().clamp(-3)
    places = F.scaled_dot_product_attention(places, places, places, **more)
    return places.movedim((-1, -2), (1, axis))


class FramesAsBatch(nn.Module):
    """A layer of one rank less on each place along the axis."""

    def __init__(self, layer, axis):
        super().__init__()
        self.layer, self.axis = layer, axis

    def forward(self, x):
        frames = x.movedim(self.axis, 1).flatten(0, 1)
        return self.layer(frames).unflatten(0, (len(x), -1)).movedim(1, self.axis)


def linear(rank):
    return {1: "linear", 2: "bilinear", 3: "trilinear"}[rank]


LAYERS = {
    "conv": lambda rank, axis: layer("Conv", rank, 8, 8, 5, 2, 2, groups=2),
    "dilated conv": lambda rank, axis: layer("Conv", rank, 8, 8, 3, padding="same", dilation=2),
    "causal conv": causal,
    "causal conv from the first frame": lambda rank, axis: causal(rank, axis, "replicate"),
    "transposed conv": lambda rank, axis: layer(
        "ConvTranspose", rank, 8, 8, 4, 3, 1, output_padding=2
    ),
    "max pool": lambda rank, axis: layer("MaxPool", rank, 3, 2, 1),
    "dense max pool": lambda rank, axis: layer("MaxPool", rank, 3, 1, 1),
    "average pool": lambda rank, axis: layer("AvgPool", rank, 3, 2),
    "global average": lambda rank, axis: (
        lambda x: x * getattr(F, f"adaptive_avg_pool{rank}d")(x, 1)
    ),
    "global maximum": lambda rank, axis: (
        lambda x: x * getattr(F, f"adaptive_max_pool{rank}d")(x, 1)
    ),
    "nearest": lambda rank, axis: nn.Upsample(scale_factor=2),
    "nearest, exact": lambda rank, axis: nn.Upsample(scale_factor=2, mode="nearest-exact"),
    "nearest, this axis only": lambda rank, axis: nn.Upsample(
        scale_factor=tuple(3.0 if at == axis - 2 else 1.0 for at in range(rank))
    ),
    "nearest, other axes only": lambda rank, axis: nn.Upsample(
        scale_factor=tuple(1.0 if at == axis - 2 else 1.5 for at in range(rank))
    ),
    "nearest to a size": lambda rank, axis: (
        lambda x: F.interpolate(
            x, [2 * side if at == axis - 2 else 5 for at, side in enumerate(x.shape[2:])]
        )
    ),
    "linear": lambda rank, axis: nn.Upsample(scale_factor=3, mode=linear(rank)),
    "linear, other axes only": lambda rank, axis: (
        lambda x: F.interpolate(
            x,
            [side if at == axis - 2 else 10 for at, side in enumerate(x.shape[2:])],
            mode=linear(rank),
            align_corners=True,
        )
    ),
    "nearest, fewer": lambda rank, axis: nn.Upsample(scale_factor=0.5),
    "linear, fewer": lambda rank, axis: nn.Upsample(
        scale_factor=tuple(1 / 3 if at == axis - 2 else 0.5 for at in range(rank)),
        mode=linear(rank),
    ),
    "every third": lambda rank, axis: lambda x: every_third(x, axis),
    "overlapping windows": lambda rank, axis: lambda x: x.unfold(axis, 4, 3).amax(-1),
    "windows of channels": lambda rank, axis: (
        lambda x: x.unfold(1, 2, 2).movedim(-1, 1).flatten(1, 2)
    ),
    "attention to earlier places": lambda rank, axis: lambda x: attended(x, axis, is_causal=True),
    "attention with a mask": lambda rank, axis: lambda x: attended(x, axis, attn_mask=True),
    "the first apart": lambda rank, axis: lambda x: selected_apart(x, axis),
    "after others": lambda rank, axis: lambda x: after_others(x, axis),
    "repeated": lambda rank, axis: lambda x: x[:, :4].repeat(1, 2, *[2] * rank),
    "group norm": lambda rank, axis: nn.GroupNorm(4, 8),
    "instance norm": lambda rank, axis: layer("InstanceNorm", rank, 8, affine=True),
    "batch norm": lambda rank, axis: layer("BatchNorm", rank, 8),
    "layer norm of channels": lambda rank, axis: (
        lambda x: F.layer_norm(x.movedim(1, -1), [8]).movedim(-1, 1)
    ),
    "RMS norm of channels": lambda rank, axis: lambda x: F.normalize(x, dim=1) * 8**0.5,
    "frames as batch": lambda rank, axis: FramesAsBatch(
        nn.Sequential(layer("Conv", rank - 1, 8, 8, 3, padding=1), nn.GroupNorm(4, 8))
        if rank > 1
        else nn.PReLU(8),
        axis,
    ),
    "shuffled": lambda rank, axis: lambda x: shuffled(torch.cat([x, -x], 1), axis),
    "all but the first doubled": lambda rank, axis: lambda x: doubled_but_first(x, axis),
    "replicated": lambda rank, axis: lambda x: F.pad(x, [2, 1] * rank, mode="replicate"),
    "mean and variance": lambda rank, axis: (
        lambda x: (x - x.mean(axis, True)) / x.std(tuple(range(2, x.dim())), keepdim=True)
    ),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize(("rank", "axis"), [(1, 2), (2, 2), (2, 3), (3, 2), (3, 3), (3, 4)])
def test_layers_along_each_axis(rank, axis):
    torch.manual_seed(2)
    module = Layers({name: make(rank, axis) for name, make in LAYERS.items()}, rank).double()
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.1 * torch.randn_like(weight)
    x = torch.randn(1, 3, *SIDES[rank], dtype=torch.float64)
    check_parity(module, x, axis=axis, bands=(2, 5), parts=(1, 3))
