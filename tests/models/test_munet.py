"""MUNet: logits for every pixel, and gradients through every branch."""

from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from lowtide import ModelError, UsageError
from lowtide.models.paragonsr2.munet import (
    BRANCHES,
    EdgeBranch,
    MUNet,
    MUNetConfig,
    SpectrumBranch,
    rec601_luma,
)

# Learned values of the usual shape.
LEARNED = 12022468
SMALL = MUNetConfig(features=8, widths=(1, 2, 2), window=8, shared=2)


def munet(config=SMALL):
    torch.manual_seed(0)
    return MUNet(config)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 30), (16, 16), (33, 40), (65, 23)])
@torch.no_grad()
def test_any_size(height, width):
    logits = munet()(torch.rand(2, 3, height, width))
    assert logits.shape == (2, 1, height, width)
    assert logits.isfinite().all()


def test_the_usual_shape():
    with torch.device("meta"):
        network = MUNet(MUNetConfig())
    assert sum(weight.numel() for weight in network.parameters()) == LEARNED
    assert network.config.multiple_of == 16


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_gradient_reaches_the_image_through_every_branch_alone(branch):
    """The seed's frequency branch computed its luma without gradients."""
    network, image = munet(), torch.rand(1, 3, 32, 24, requires_grad=True)
    found = network.branches(image)
    alone = {name: map if name == branch else map.detach() for name, map in found.items()}
    (gradient,) = torch.autograd.grad(network.fuse(alone, image).sum(), image)
    assert gradient.isfinite().all()
    assert (gradient.abs().amax(1) > 0).float().mean() > 0.9


def test_every_weight_learns():
    network = munet()
    network(torch.rand(2, 3, 32, 24)).square().mean().backward()
    silent = [
        name
        for name, weight in network.named_parameters()
        if weight.grad is None or not weight.grad.any()
    ]
    assert not silent


def test_every_layer_has_a_spectral_norm():
    plain = [
        name
        for name, module in munet().named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear)) and not parametrize.is_parametrized(module)
    ]
    assert not plain


@torch.no_grad()
def test_weights_stay_bounded():
    network = munet().train()
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.parametrizations.weight.original.mul_(100)
    for _ in range(40):
        network(torch.rand(1, 3, 16, 16))
    largest = max(
        torch.linalg.matrix_norm(module.weight.flatten(1), 2).item()
        for module in network.modules()
        if isinstance(module, nn.Conv2d)
    )
    assert largest < 1.3


@torch.no_grad()
def test_edges_are_differences_of_luma():
    branch = EdgeBranch(8, 0.2)
    branch.refine = nn.Identity()
    image = torch.rand(1, 3, 5, 6)
    seen = branch(image)
    gray = rec601_luma(image)
    assert torch.equal(seen[0, 0, :, :-1], gray[0, 0, :, 1:] - gray[0, 0, :, :-1])
    assert torch.equal(seen[0, 1, :-1], gray[0, 0, 1:] - gray[0, 0, :-1])
    assert not seen[0, 0, :, -1].any() and not seen[0, 1, -1].any()


@torch.no_grad()
def test_spectra_distinguish_fine_from_coarse_stripes_locally():
    branch = SpectrumBranch(8, 0.2)
    seen = []
    branch.read = nn.Identity()
    branch.read.register_forward_hook(lambda _module, _given, made: seen.append(made))
    branch.refine = nn.Identity()
    columns = torch.arange(64.0)
    fine, coarse = (torch.cos(2 * torch.pi * columns / period) for period in (4, 16))
    picture = torch.where(columns < 32, fine, coarse) * 0.4 + 0.5
    branch(picture.expand(1, 3, 32, 64))
    strength = seen[0].unflatten(1, (16, 9))[0, 0]  # (column frequency, rows, columns)
    # Except the mean, which is at 0 and leaks into 1.
    strongest = strength[2:, 2].argmax(0) + 2
    assert strongest[:3].tolist() == [4, 4, 4]
    assert (strength[1, 2, 5:] > strength[4, 2, 5:]).all()


def test_flat_images_have_finite_gradients():
    network, image = munet(), torch.full((1, 3, 16, 16), 0.5, requires_grad=True)
    (gradient,) = torch.autograd.grad(network(image).sum(), image)
    assert gradient.isfinite().all()


def test_mixed_precision():
    with torch.autocast("cpu", torch.bfloat16):
        logits = munet()(torch.rand(1, 3, 32, 32))
    assert logits.isfinite().all()


def test_configurations():
    assert MUNetConfig.from_dict(asdict(SMALL)) == SMALL
    assert MUNetConfig.from_dict({}) == MUNetConfig()
    for wrong in ({"features": 4}, {"widths": []}, {"slope": 1.0}, {"width": 3}):
        with pytest.raises(ModelError):
            MUNetConfig.from_dict(wrong)


def test_images_of_another_kind_are_refused():
    with pytest.raises(UsageError, match=r"\(B, 3, H, W\)"):
        munet()(torch.rand(1, 1, 8, 8))
