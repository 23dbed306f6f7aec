"""Losses against closed forms, NumPy and scikit-image."""

import math

import numpy as np
import pytest
import torch
from skimage.metrics import structural_similarity

from lowtide import UsageError
from lowtide.training.losses import make_loss
from lowtide.training.losses.pixel import CharbonnierLoss, FFTLoss, L1Loss, MSELoss, MSSSIMLoss
from support.loss_inputs import gradient_of, pictures

PLAIN = L1Loss(), CharbonnierLoss(), MSELoss(), FFTLoss(), MSSSIMLoss()
plain = pytest.mark.parametrize("loss", PLAIN, ids=lambda loss: type(loss).__name__)


# Values


def test_pixel_losses_in_numbers():
    target = torch.zeros(1, 3, 1, 2)
    prediction = torch.tensor([[3.0, -4.0]]).expand(1, 3, 1, 2)
    assert L1Loss()(prediction, target).item() == 3.5
    assert MSELoss()(prediction, target).item() == 12.5
    found = CharbonnierLoss(eps=4.0)(prediction, target).item()
    assert found == pytest.approx((5 + math.sqrt(32)) / 2, rel=1e-6)
    assert CharbonnierLoss()(target, target).item() == pytest.approx(1e-3, rel=1e-6)


def test_fft_loss_is_that_of_numpy():
    for height, width in ((1, 1), (8, 8), (7, 12), (13, 31)):
        prediction, target = pictures(2, 3, height, width)
        ours, theirs = (
            np.fft.rfft2(picture.double().numpy(), norm="ortho") for picture in (prediction, target)
        )
        parts = np.abs((ours - theirs).real).mean(), np.abs((ours - theirs).imag).mean()
        assert FFTLoss()(prediction, target).item() == pytest.approx(np.mean(parts), rel=1e-5)


def window():
    taps = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    return np.outer(taps, taps) / taps.sum() ** 2


def slow_similarities(x, y):
    """Mean of luminance times structure and mean of structure, one window at a time."""
    weights, full, structure = window(), [], []
    for row in range(x.shape[0] - 10):
        for column in range(x.shape[1] - 10):
            one, other = (side[row : row + 11, column : column + 11] for side in (x, y))
            mean_one, mean_other = (weights * one).sum(), (weights * other).sum()
            of_one = (weights * (one - mean_one) ** 2).sum()
            of_other = (weights * (other - mean_other) ** 2).sum()
            shared = (weights * (one - mean_one) * (other - mean_other)).sum()
            structure.append((2 * shared + 9e-4) / (of_one + of_other + 9e-4))
            bright = (2 * mean_one * mean_other + 1e-4) / (mean_one**2 + mean_other**2 + 1e-4)
            full.append(bright * structure[-1])
    return np.mean(full), np.mean(structure)


def slow_ms_ssim(x, y, weights):
    product = 1.0
    for scale, weight in enumerate(weights):
        full, structure = slow_similarities(x, y)
        product *= (full if scale == len(weights) - 1 else structure) ** weight
        height, width = (side // 2 * 2 for side in x.shape)
        x, y = (
            side[:height, :width].reshape(height // 2, 2, width // 2, 2).mean((1, 3))
            for side in (x, y)
        )
    return product


@pytest.mark.parametrize(
    ("height", "width", "weights"),
    [
        (176, 177, (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)),
        (45, 60, np.array([0.0448, 0.2856, 0.3001]) / 0.6305),
        (23, 43, np.array([0.0448, 0.2856]) / 0.3304),
    ],
)
def test_ms_ssim_is_that_of_the_paper(height, width, weights):
    prediction, target = pictures(1, 3, height, width, noise=0.5)
    prediction = 0.7 * prediction
    channels = zip(prediction[0].double().numpy(), target[0].double().numpy(), strict=True)
    expected = np.mean([slow_ms_ssim(one, other, weights) for one, other in channels])
    assert 0.05 < 1 - expected < 0.8
    assert MSSSIMLoss()(prediction, target).item() == pytest.approx(1 - expected, rel=1e-4)


def test_one_scale_is_the_ssim_of_scikit_image():
    for height, width in ((11, 11), (13, 40), (21, 21)):
        prediction, target = pictures(2, 3, height, width)
        each = [
            structural_similarity(
                one.double().numpy(),
                other.double().numpy(),
                data_range=1.0,
                channel_axis=0,
                gaussian_weights=True,
                sigma=1.5,
                use_sample_covariance=False,
            )
            for one, other in zip(prediction, target, strict=True)
        ]
        assert MSSSIMLoss()(prediction, target).item() == pytest.approx(1 - np.mean(each), rel=1e-4)


def test_ms_ssim_of_flat_images_is_the_luminance_of_the_last_scale():
    dark, light = (torch.full((1, 3, 176, 180), value) for value in (0.3, 0.6))
    luminance = (2 * 0.3 * 0.6 + 1e-4) / (0.3**2 + 0.6**2 + 1e-4)
    assert MSSSIMLoss()(dark, light).item() == pytest.approx(1 - luminance**0.1333, rel=1e-4)


def test_ms_ssim_of_a_negative_is_almost_1_and_finite():
    _, target = pictures(1, 3, 64, 64)
    value, gradient = gradient_of(MSSSIMLoss(), 1 - target, target)
    assert 0.5 < value < 1
    assert gradient.isfinite().all()


# What all have in common


def test_equal_images_have_no_loss_and_finite_gradients():
    for loss in PLAIN:
        _, target = pictures(1, 3, 45, 52)
        for picture in (target, torch.full_like(target, 0.7), torch.zeros_like(target)):
            value, gradient = gradient_of(loss, picture, picture)
            assert value.item() == (pytest.approx(1e-3) if isinstance(loss, CharbonnierLoss) else 0)
            assert gradient.isfinite().all()
            assert gradient.abs().max() < 1e-5


def test_a_flat_prediction_has_a_finite_gradient():
    for loss in PLAIN:
        _, target = pictures(1, 3, 50, 45)
        _, gradient = gradient_of(loss, torch.full_like(target, 0.5), target)
        assert gradient.isfinite().all() and gradient.any()


@plain
def test_half_types_are_computed_in_fp32(loss):
    for kind in (torch.bfloat16, torch.float16):
        prediction, target = pictures(2, 3, 33, 47)
        prediction = prediction.to(kind)
        expected = loss(prediction.float(), target)
        with torch.autocast("cpu", torch.bfloat16):
            value, gradient = gradient_of(loss, prediction, target)
            assert loss(prediction.float(), target) == expected
        assert value == expected and value.dtype == torch.float32
        assert gradient.dtype == kind and gradient.isfinite().all()


@plain
def test_gradients_are_those_of_finite_differences(loss):
    prediction, target = pictures(1, 3, 22, 23, dtype=torch.float64)
    given = prediction.requires_grad_()
    assert torch.autograd.gradcheck(loss, (given, target), eps=1e-7, atol=1e-6, fast_mode=True)


@plain
def test_descent_finds_the_target(loss):
    start, target = pictures(1, 3, 24, 24)
    prediction = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([prediction], lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss(prediction, target).backward()
        optimizer.step()
    assert loss(prediction, target) < loss(start, target) / 2


def test_losses_have_no_state():
    for loss in PLAIN:
        assert not loss.state_dict() and not list(loss.parameters())


def test_other_shapes_are_refused():
    for loss in PLAIN:
        for prediction, target, message in (
            ((1, 3, 16, 16), (1, 3, 32, 32), r"\(1, 3, 16, 16\) and target \(1, 3, 32, 32\)"),
            ((2, 3, 16, 16), (1, 3, 16, 16), "same shape"),
            ((1, 1, 16, 16), (1, 1, 16, 16), r"\(B, 3, H, W\)"),
            ((3, 16, 16), (3, 16, 16), r"\(B, 3, H, W\)"),
            ((0, 3, 16, 16), (0, 3, 16, 16), "empty"),
        ):
            with pytest.raises(UsageError, match=message):
                loss(torch.rand(prediction), torch.rand(target))


def test_invalid_values_are_refused():
    bytes_ = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"torch\.uint8"):
        L1Loss()(bytes_, bytes_)
    with pytest.raises(UsageError, match="at least 11 pixels, not an image of 64x10"):
        MSSSIMLoss()(torch.rand(1, 3, 10, 64), torch.rand(1, 3, 10, 64))
    for eps in (0, -1.0, math.nan, math.inf, "1e-3"):
        with pytest.raises(UsageError, match="eps must be a finite number above 0"):
            CharbonnierLoss(eps)  # pyright: ignore[reportArgumentType]


# By name


def test_losses_by_name():
    for name, kind in (
        ("l1", L1Loss),
        ("L1Loss", L1Loss),
        ("charbonnier", CharbonnierLoss),
        ("CharbonnierLoss", CharbonnierLoss),
        ("mseloss", MSELoss),
        ("msssim", MSSSIMLoss),
        ("MSSSIMLoss", MSSSIMLoss),
        ("MS-SSIM", MSSSIMLoss),
        ("fft_loss", FFTLoss),
    ):
        assert type(make_loss(name)) is kind


def test_options_of_a_name():
    made = make_loss("charbonnier", eps=0.5)
    assert isinstance(made, CharbonnierLoss) and made.eps == 0.5


def test_names_and_options_there_are_not():
    for name, options, message, hint in (
        ("charbonier", {}, "unknown loss 'charbonier'.*perceptual", "'charbonnier'"),
        ("PerceptalLoss", {}, "unknown loss 'PerceptalLoss'", "'perceptual'"),
        ("zzz", {}, "unknown loss 'zzz'", "use one of l1, charbonnier"),
        ("charbonnier", {"epsilon": 1}, "no option 'epsilon'; it has: eps", "'eps'"),
        ("l1", {"reduction": "sum"}, "no option 'reduction'; it has: none", "remove"),
        ("perceptual", {"layers": {}}, "needs the option 'weights'", None),
        ("charbonnier", {"eps": 0}, "eps must be", None),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            make_loss(name, **options)
        assert (caught.value.hint or "").find(hint or "") >= 0
