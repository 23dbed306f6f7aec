"""LPIPS and DISTS: the published formulas by the file that is given, nothing downloaded."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import alexnet, vgg16

from lowtide import UsageError
from lowtide.training.losses.perceptual import PerceptualMetric
from support.feature_networks import features

MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def alex():
    return features(alexnet)


@pytest.fixture(scope="module")
def vgg():
    return features(vgg16)


@pytest.fixture(scope="module")
def alex_file(alex, tmp_path_factory):
    path = tmp_path_factory.mktemp("alex") / "mine.pth"
    torch.save({f"features.{name}": tensor for name, tensor in alex.state_dict().items()}, path)
    return path


@pytest.fixture(scope="module")
def vgg_file(vgg, tmp_path_factory):
    path = tmp_path_factory.mktemp("vgg") / "mine.safetensors"
    save_file(vgg.state_dict(), path)
    yield path
    path.unlink()


@pytest.fixture(autouse=True)
def _nothing_is_downloaded(monkeypatch):
    def refuse(*_args, **_keywords):
        raise AssertionError("tried to download")

    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)


def pictures(height, width):
    first = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    return first, (first + 0.1 * torch.randn(first.shape, generator=torch.Generator())).clamp(0, 1)


def seen(network, picture, places):
    """Maps after those layers, each computed from the picture on."""
    normal = (picture - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
    return [network[: place + 1](normal.clone()) for place in places]


def lpips_by_hand(network, places, prediction, target, learned):
    total = torch.zeros(len(prediction))
    # LPIPS scales pictures in -1..1 by the mean and deviation of that range.
    for found, wanted, weight in zip(
        seen(network, prediction, places), seen(network, target, places), learned, strict=True
    ):
        unit = [one / (one.square().sum(1, keepdim=True) + 1e-8).sqrt() for one in (found, wanted)]
        difference = (unit[0] - unit[1]).square()
        total += (difference * weight.view(1, -1, 1, 1)).sum(1).mean((1, 2))
    return total


def learned_weights(net, count):
    from pathlib import Path

    import torchmetrics.functional.image as package

    path = Path(package.__file__).parent / "lpips_models" / f"{net}.pth"
    state = torch.load(path, map_location="cpu", weights_only=True)
    return [state[f"lin{place}.model.1.weight"].flatten() for place in range(count)]


def test_lpips_is_the_published_formula_by_the_files_network(alex, alex_file):
    measure = PerceptualMetric("lpips", alex_file)
    prediction, target = pictures(40, 53)
    expected = lpips_by_hand(alex, (1, 4, 7, 9, 11), prediction, target, learned_weights("alex", 5))
    # LPIPS rounds ImageNet's mean and deviation to three places.
    torch.testing.assert_close(measure(prediction, target), expected, rtol=5e-3, atol=0)
    assert measure(target, target).abs().max() == 0


def test_lpips_by_vgg_and_dists_take_the_same_file(vgg_file):
    prediction, target = pictures(35, 48)
    for kind in ("lpips", "dists"):
        measure = PerceptualMetric(kind, vgg_file, "vgg")
        near, far = measure(prediction, target), measure(prediction, target.flip(3))
        assert near.shape == (2,)
        assert (near > 1e-4).all()
        assert (near < far).all()
        assert measure(target, target).abs().max() < 1e-6
        assert not any(value.requires_grad for value in measure.parameters())


def pooled(maps):
    """DISTS' pooling: the root of the mean square in a Hann window, every other pixel."""
    window = torch.tensor([0.5, 1.0, 0.5])
    window = (window[:, None] * window / 4).expand(maps.shape[1], 1, 3, 3)
    squares = nn.functional.conv2d(maps.square(), window, stride=2, padding=1, groups=len(window))
    return (squares + 1e-12).sqrt()


def dists_by_hand(network, prediction, target, alpha, beta):
    likeness, total, place = 0.0, alpha.sum() + beta.sum(), 0
    pair = [prediction, target]
    stages = [range(4), range(5, 9), range(10, 16), range(17, 23), range(24, 30)]
    for stage in [None, *stages]:
        if stage is not None:
            pair = [
                (one - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
                if stage[0] == 0
                else pooled(one)
                for one in pair
            ]
            pair = [nn.Sequential(*(network[at] for at in stage))(one) for one in pair]
        x, y = (one.flatten(2) for one in pair)
        means = 2 * x.mean(2) * y.mean(2) + 1e-6, x.mean(2) ** 2 + y.mean(2) ** 2 + 1e-6
        shared = 2 * ((x * y).mean(2) - x.mean(2) * y.mean(2)) + 1e-6
        spread = x.var(2, correction=0) + y.var(2, correction=0) + 1e-6
        some = slice(place, place + x.shape[1])
        likeness += (alpha[some] * means[0] / means[1] + beta[some] * shared / spread).sum(1)
        place += x.shape[1]
    return 1 - likeness / total


def test_dists_is_the_published_formula_by_the_files_network(vgg, vgg_file):
    measure = PerceptualMetric("dists", vgg_file)
    learned = dict(measure.named_parameters())
    alpha, beta = (
        next(value for name, value in learned.items() if name.endswith(which)).flatten()
        for which in ("alpha", "beta")
    )
    prediction, target = pictures(35, 48)
    expected = dists_by_hand(vgg, prediction, target, alpha, beta)
    torch.testing.assert_close(measure(prediction, target), expected, rtol=1e-3, atol=1e-6)


def test_the_folder_of_downloads_is_left_as_it_was(alex_file):
    before = torch.hub.get_dir()
    PerceptualMetric("lpips", alex_file)
    assert torch.hub.get_dir() == before


def test_refusals(alex_file, vgg_file, tmp_path):
    with pytest.raises(UsageError, match="does not match VGG16") as caught:
        PerceptualMetric("dists", alex_file)
    assert "vgg16-397923af.pth" in caught.value.hint
    with pytest.raises(UsageError, match="no file with AlexNet weights"):
        PerceptualMetric("lpips", tmp_path / "none.pth")
    with pytest.raises(UsageError, match=r"\.pth or \.safetensors"):
        PerceptualMetric("lpips", tmp_path / "none.ckpt")
    with pytest.raises(UsageError, match="only VGG16"):
        PerceptualMetric("dists", vgg_file, "alex")
    measure = PerceptualMetric("lpips", alex_file)
    with pytest.raises(UsageError, match="at least 31 pixels, not an image of 40×30"):
        measure(*pictures(30, 40))
    assert measure(*pictures(31, 31)).shape == (2,)


def test_without_torchmetrics_it_says_what_to_install(alex_file, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="torchmetrics") as caught:
        PerceptualMetric("lpips", alex_file)
    assert ".[train]" in caught.value.hint
