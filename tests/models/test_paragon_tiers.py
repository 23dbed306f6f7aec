"""ParagonSR2 as it is published: its fixed path, its windows, and its files."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import lowtide
from lowtide import ModelError
from lowtide.models.paragonsr2.config import TierConfig
from lowtide.models.paragonsr2.tier_blocks import (
    BLUR,
    SHARP,
    MagicKernelUpsample,
    ShiftedWindowAttention,
)
from lowtide.models.paragonsr2.tiers import ParagonTier

# Learned values at ×4, of the public README's counts without the 72 of the fixed path.
COUNTS = {"realtime": 44_620, "stream": 221_068, "photo": 1_188_428, "pro": 2_436_556}
FIXED = 72
# What the public implementation makes, in double precision, of `waves` of the values' places:
# means, and rows 0, 17, 37 with columns 0, 40, 73 of the three colors.
PUBLISHED = {
    "realtime": (
        0.4677234065676672,
        [
            1.698219293,
            1.244856302,
            -0.139056049,
            1.584340368,
            0.620435276,
            -0.050580735,
            1.788179182,
            -0.746797073,
            -0.441521445,
        ],
    ),
    "stream": (
        0.503612013412627,
        [
            0.335685897,
            0.535332702,
            0.192814841,
            0.275128001,
            0.955345263,
            0.474608305,
            0.653123894,
            0.37653966,
            0.076039221,
        ],
    ),
    "photo": (
        0.47472963900943466,
        [
            0.073916026,
            0.171185818,
            0.046636247,
            0.065588289,
            0.820838298,
            0.344603262,
            0.485691657,
            0.646026839,
            0.164569175,
        ],
    ),
    "pro": (
        0.47480865285167134,
        [
            0.305365496,
            0.28969271,
            0.130207652,
            -0.061024271,
            0.500365207,
            0.47258357,
            0.132828963,
            0.222044285,
            0.201309738,
        ],
    ),
}


@torch.no_grad()
def waves(network):
    for number, (name, weight) in enumerate(sorted(network.named_parameters())):
        places = torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)
        ones = name.endswith(("norm.scale", "norm1.scale"))
        weight.copy_(0.2 * torch.sin(places * 0.7 + number) + ones)
    return network.eval()


@pytest.mark.parametrize("tier", PUBLISHED)
@torch.no_grad()
def test_equals_the_public_implementation(tier):
    places = torch.arange(3 * 19 * 37, dtype=torch.float64).reshape(1, 3, 19, 37)
    result = waves(ParagonTier(TierConfig.of(tier, 2))).double()(places.mul(0.05).sin() / 2 + 0.5)
    mean, pixels = PUBLISHED[tier]
    # The fixed path's taps are whole 32nds, and the sharpening's share is a float.
    assert result.mean().item() == pytest.approx(mean, abs=1e-7)
    found = result[0, :, [0, 17, 37], [0, 40, 73]].flatten().tolist()
    assert found == pytest.approx(pixels, abs=1e-6)


@pytest.mark.parametrize("tier", COUNTS)
def test_parameter_counts_are_as_published(tier):
    network = ParagonTier(TierConfig.of(tier, 4))
    assert sum(weight.numel() for weight in network.parameters()) == COUNTS[tier] - FIXED


@pytest.mark.grid(3)
@pytest.mark.parametrize("scale", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 9), (13, 7)])
def test_the_fixed_path_equals_its_definition(scale, height, width):
    image = torch.rand(2, 3, height, width, dtype=torch.float64)

    def filtered(x, taps):
        kernel = torch.tensor(taps, dtype=torch.float64).expand(3, 1, 1, -1)
        x = F.conv2d(x, kernel, padding=(0, len(taps) // 2), groups=3)
        return F.conv2d(x, kernel.mT, padding=(len(taps) // 2, 0), groups=3)

    sharp = image + 0.4 * (filtered(image, SHARP) - image)
    expected = filtered(F.interpolate(sharp, scale_factor=scale, mode="nearest"), BLUR)
    found = MagicKernelUpsample(3, scale, 0.4).double()(image)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize(("height", "width"), [(4, 4), (5, 11), (3, 8)])
@torch.no_grad()
def test_windows_are_filled_with_zeros_and_go_round(height, width, shift):
    module = ShiftedWindowAttention(8, 2, 4, shift).double()
    image = torch.randn(1, 8, height, width, dtype=torch.float64)
    rows, columns = (-(-side // 4) * 4 for side in (height, width))
    full = F.pad(image, (0, columns - width, 0, rows - height))
    expected = torch.zeros_like(full)
    for top, left in itertools.product(range(0, rows, 4), range(0, columns, 4)):
        places = [
            ((top + y + shift) % rows, (left + x + shift) % columns)
            for y in range(4)
            for x in range(4)
        ]
        tokens = torch.stack([full[0, :, y, x] for y, x in places])
        query, key, value = module.qkv(tokens).view(16, 3, 2, 4).permute(1, 2, 0, 3)
        weights = (query @ key.mT / 2).softmax(-1)  # the root of a head's four channels
        found = module.proj((weights @ value).transpose(0, 1).reshape(16, 8))
        for token, (y, x) in zip(found, places, strict=True):
            expected[0, :, y, x] = token
    result = module(image)
    torch.testing.assert_close(result, expected[..., :height, :width], atol=1e-12, rtol=0)


def small(tier, scale=2, **changes):
    torch.manual_seed(0)
    config = TierConfig.of(tier, scale)
    given = {**vars(config), "features": 16, "groups": 1, "blocks": 2, **changes}
    network = ParagonTier(TierConfig(**given)).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight += torch.randn(weight.shape) * 0.05
    return network


def written(network, path, **more):
    """As the public trainer writes it, the fixed path included."""
    state = {
        **network.state_dict(),
        "base.sharp.kernel": torch.tensor(SHARP),
        "base.blur.kernel": torch.tensor(BLUR),
        **more,
    }
    if path.suffix == ".safetensors":
        save_file({key: value.contiguous() for key, value in state.items()}, path)
    else:
        torch.save({"params_ema": state}, path)
    return path


@pytest.mark.grid(3)
@pytest.mark.parametrize("scale", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tier", COUNTS)
@torch.no_grad()
def test_files_are_recognized(tmp_path, tier, scale):
    network = small(tier, scale)
    suffix = ".pth" if scale == 2 else ".safetensors"
    model = lowtide.load(written(network, tmp_path / f"any{suffix}"))
    facts = model.descriptor
    assert (facts.architecture, facts.scale, facts.in_channels) == ("ParagonSR2", scale, 3)
    assert facts.tags == (tier, "16nf", "1x2")
    assert facts.tiling == ("discouraged" if tier in ("photo", "pro") else "supported")
    image = torch.rand(1, 3, 19, 21)
    assert torch.equal(model.module(image), network(image))


def test_a_file_without_attention(tmp_path):
    network = small("photo", attention=False)
    facts = lowtide.load(written(network, tmp_path / "plain.safetensors")).descriptor
    assert facts.tiling == "supported"


def test_a_file_in_half_precision(tmp_path):
    network = small("stream")
    half = {key: value.half() for key, value in network.state_dict().items()}
    path = tmp_path / "half.safetensors"
    save_file({**half, "base.sharp.kernel": torch.tensor(SHARP).half()}, path)
    assert lowtide.load(path).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base.blur.kernel": torch.ones(5) / 5}, "its fixed path has other filters"),
        ({"up.0.weight": torch.zeros(50, 16, 3, 3)}, "its scale is not an integer"),
        ({"body.0.blocks.0.conv1.weight": torch.zeros(7, 16, 1, 1)}, "do not fit: size mismatch"),
        ({"conv_in.weight": torch.zeros(16, 5, 3, 3)}, "its scale is not an integer"),
    ],
    ids=["kernel", "scale", "shape", "channels"],
)
def test_mismatched_tensors_are_named(tmp_path, change, reason):
    path = written(small("realtime"), tmp_path / "odd.safetensors", **change)
    with pytest.raises(ModelError, match=reason):
        lowtide.load(path)
