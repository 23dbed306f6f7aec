"""The perceptual loss against torchvision's VGG19."""

import inspect

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import vgg19

from lowtide import UsageError
from lowtide.training.losses.perceptual import PerceptualLoss
from support.feature_networks import features
from support.loss_inputs import gradient_of, pictures

# Where each layer of VGG19 is among torchvision's features, counted by hand.
PLACES = {"conv1_2": 2, "conv2_2": 7, "conv3_4": 16, "conv4_4": 25, "conv5_4": 34}
USUAL = {"conv1_2": 0.1, "conv2_2": 0.1, "conv3_4": 1.0, "conv4_4": 1.0, "conv5_4": 1.0}


@pytest.fixture(scope="session")
def network():
    return features(vgg19)


@pytest.fixture(scope="session")
def weights(network, tmp_path_factory):
    """A file like torchvision's; 80 MB, which do not stay."""
    path = tmp_path_factory.mktemp("vgg") / "vgg19.pth"
    state = {f"features.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save(state | {"classifier.0.bias": torch.zeros(4096)}, path)
    yield path
    path.unlink()


@pytest.fixture(scope="session")
def perceptual(weights):
    return PerceptualLoss(weights)


def by_hand(network, picture, place):
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    # In-place ReLUs write only into what is before them, which is not what a cut ends with.
    return network[: place + 1]((picture - mean) / deviation)


def few_weights(network, path, prefix="", kind=torch.float32):
    """The first two convolutions' tensors, in a small file."""
    few = network[:3].state_dict()
    save_file({f"{prefix}{name}": tensor.to(kind) for name, tensor in few.items()}, path)
    return path


def test_perceptual_loss_is_that_of_torchvisions_network(perceptual, network):
    prediction, target = pictures(1, 3, 35, 48)
    expected = sum(
        USUAL[name]
        * nn.functional.l1_loss(
            by_hand(network, prediction, place), by_hand(network, target, place)
        )
        for name, place in PLACES.items()
    )
    assert perceptual.layers == USUAL
    assert perceptual(prediction, target).item() == pytest.approx(float(expected), rel=1e-5)
    assert (by_hand(network, target, 34) < 0).any(), "before the ReLU"


def test_weights_in_other_forms(network, tmp_path):
    for kind in (torch.float32, torch.bfloat16):
        for prefix in ("", "features."):
            path = few_weights(network, tmp_path / "few.safetensors", prefix, kind)
            prediction, target = pictures(1, 3, 9, 12)
            loss = PerceptualLoss(path, {"conv1_1": 0.5})(prediction, target)
            expected = by_hand(network, prediction, 0) - by_hand(network, target, 0)
            tolerance = 1e-5 if kind == torch.float32 else 1e-2
            assert loss.item() == pytest.approx(0.5 * expected.abs().mean().item(), rel=tolerance)


def test_gradients_reach_the_prediction(perceptual):
    prediction, target = pictures(2, 3, 33, 17)
    value, gradient = gradient_of(perceptual, prediction, target)
    assert value.dtype == torch.float32
    assert gradient.isfinite().all() and (gradient != 0).float().mean() > 0.99
    same, gradient = gradient_of(perceptual, target, target)
    assert same == 0 and not gradient.any()


def test_gradients_are_those_of_finite_differences_in_vgg(network, tmp_path):
    loss = PerceptualLoss(few_weights(network, tmp_path / "few.safetensors"), {"conv1_2": 1.0})
    prediction, target = pictures(1, 3, 5, 6, dtype=torch.float64)
    given = prediction.requires_grad_()
    assert torch.autograd.gradcheck(loss.double(), (given, target), eps=1e-8, fast_mode=True)


@pytest.mark.parametrize("flat", [False, True])
def test_perceptual_loss_under_autocast(perceptual, flat):
    prediction, target = pictures(1, 3, 32, 32)
    prediction = torch.full_like(prediction, 0.5) if flat else prediction
    expected = perceptual(prediction, target)
    with torch.autocast("cpu", torch.bfloat16):
        value, gradient = gradient_of(perceptual, prediction, target)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=0.05)
    assert gradient.isfinite().all()


def test_the_network_stays_frozen_and_goes_along(network, tmp_path):
    loss = PerceptualLoss(few_weights(network, tmp_path / "few.safetensors"), {"conv1_2": 1})
    nn.Sequential(loss).train()
    assert not any(weight.requires_grad for weight in loss.parameters())
    assert not loss.network.training
    prediction, target = pictures(1, 3, 8, 8)
    first = loss(prediction.requires_grad_(), target)
    first.backward()
    loss.double()
    assert loss(prediction.double(), target).dtype == torch.float64
    assert loss(prediction.double(), target).item() == pytest.approx(first.item(), rel=1e-5)
    loss.to("meta")
    assert loss(prediction.to("meta"), target.to("meta")).device.type == "meta"


def test_a_file_that_does_not_fit(network, tmp_path):
    path = few_weights(network, tmp_path / "few.safetensors")
    with pytest.raises(UsageError, match=r"it has no 5\.weight, no 5\.bias, .* and 24 more"):
        PerceptualLoss(path)
    wrong = tmp_path / "wrong.pth"
    torch.save({"features.0.weight": torch.zeros(64, 1, 3, 3), "0.bias": torch.zeros(64)}, wrong)
    with pytest.raises(UsageError, match=r"0\.weight of shape \(64, 1, 3, 3\) instead of \(64, 3,"):
        PerceptualLoss(wrong, {"conv1_1": 1.0})


def test_a_file_that_is_none(tmp_path):
    for content in (b"", b"<html>not found</html>", b"PK\x03\x04 cut off"):
        for name in ("page.pth", "page.safetensors"):
            path = tmp_path / name
            path.write_bytes(content)
            with pytest.raises(UsageError, match=f"{name} cannot be read"):
                PerceptualLoss(path)


def test_a_program_in_a_file_is_not_run(tmp_path):
    path = tmp_path / "program.pth"
    torch.save(inspect.getsource, path)
    with pytest.raises(UsageError, match="cannot be read"):
        PerceptualLoss(path)


def test_other_files_layers_and_sizes_are_refused(perceptual, tmp_path):
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(UsageError, match=r"contains a list, not a state dict"):
        PerceptualLoss(tmp_path / "list.pth")
    with pytest.raises(UsageError, match="no file with perceptual weights"):
        PerceptualLoss(tmp_path / "none.pth")
    with pytest.raises(UsageError, match=r"\.pth or \.safetensors"):
        PerceptualLoss(tmp_path / "vgg.onnx")
    for layers, message in (
        ({"conv3_5": 1.0}, "no layer 'conv3_5'"),
        ({}, "at least one"),
        ({"conv1_2": 0}, "conv1_2"),
    ):
        with pytest.raises(UsageError, match=message):
            PerceptualLoss("vgg.pth", layers)
    with pytest.raises(UsageError, match="at least 16 pixels, not an image of 64x15"):
        perceptual(torch.rand(1, 3, 15, 64), torch.rand(1, 3, 15, 64))
