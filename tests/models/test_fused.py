"""Layers that fold their weights in every call, folded once: the same numbers."""

import copy

import torch

from lowtide.models.spandrel_files import fold_convs


def test_folded_layers_give_the_same_bits():
    from spandrel.architectures.SPAN import SPAN

    torch.manual_seed(0)
    model = SPAN(num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=2).eval()
    image = torch.rand(1, 3, 21, 18)
    with torch.no_grad():
        expected = model(image.clone())
        folded = fold_convs(copy.deepcopy(model))
        assert torch.equal(folded(image.clone()), expected)
    assert count(folded) < count(model) / 3


def test_other_models_are_left_alone():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU())
    names = [name for name, _ in model.named_modules()]
    assert [name for name, _ in fold_convs(model).named_modules()] == names


def count(model):
    return sum(weight.numel() for weight in model.parameters())
