"""Degradations: exact sizes, the benchmark's filter, and a random model that repeats itself."""

import math

import numpy as np
import pytest
import skimage.data

from lowtide.models.resample import resize_cubic
from lowtide.training.data.augment import Augmentation
from lowtide.training.data.degrade import (
    BlurKernelConfig,
    DegradationStageConfig,
    PhotoDegradation,
    PhotoDegradationConfig,
    RealDegradation,
    RealDegradationConfig,
    apply_kernel,
    bicubic_downscale,
    draw_kernel,
    gaussian_kernel,
    jpeg_roundtrip,
    resize_image,
    sinc_kernel,
)

NOTHING = DegradationStageConfig(
    BlurKernelConfig(share=0.0),
    (0.0, 0.0, 1.0),
    gaussian_share=1.0,
    gaussian=(1e-6, 1e-6),
    jpeg=(100, 100),
)
KERNELS = {
    "round": gaussian_kernel(21, (2.0, 2.0), 0.0),
    "generalized": gaussian_kernel(15, (1.5, 1.5), 0.0, "generalized", 0.7),
    "plateau": gaussian_kernel(15, (1.5, 1.5), 0.0, "plateau", 1.6),
    "sinc": sinc_kernel(13, math.pi / 2),
    "stretched": gaussian_kernel(21, (3.0, 0.8), 0.6),
    "stretched plateau": gaussian_kernel(9, (3.0, 0.8), -2.0, "plateau", 1.2),
}


def numbers(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def astronaut():
    return skimage.data.astronaut()[:96, 150:246].astype(np.float32) / 255


def test_bicubic_is_what_matlab_makes_of_files(astronaut):
    for scale in (1, 2, 3, 4):
        low = bicubic_downscale(astronaut, scale, numbers())
        levels = np.rint(astronaut * 255).astype(np.uint8)
        expected = resize_cubic(levels, 96 // scale, 96 // scale)
        assert low.dtype == np.float32
        assert np.array_equal(low, expected.astype(np.float32) / np.float32(255))


@pytest.mark.parametrize("degradation", [PhotoDegradation(), RealDegradation()])
def test_sizes_and_range_are_exact(astronaut, degradation):
    for scale in (1, 2, 3, 4, 8):
        gt = astronaut[: 5 * scale * 2, : 7 * scale]
        made = set()
        for seed in range(20):
            low = degradation(gt, scale, numbers(seed))
            assert low.shape == (10, 7, 3) and low.dtype == np.float32
            assert low.min() >= 0 and low.max() <= 1
            assert np.abs(low * 255 - np.rint(low * 255)).max() < 1e-4
            made.add(low.tobytes())
        assert len(made) >= 15  # some photographs are only made smaller


@pytest.mark.parametrize("degradation", [PhotoDegradation(), RealDegradation()])
def test_the_same_seed_makes_the_same_image(astronaut, degradation):
    for seed in range(5):
        first, second = (degradation(astronaut, 2, numbers(seed)) for _ in range(2))
        assert np.array_equal(first, second)


@pytest.mark.parametrize("degradation", [PhotoDegradation(), RealDegradation()])
def test_the_input_image_is_not_changed(astronaut, degradation):
    before = astronaut.copy()
    for seed in range(10):
        degradation(astronaut, 1, numbers(seed))
    assert np.array_equal(astronaut, before)


@pytest.mark.parametrize("degradation", [PhotoDegradation(), RealDegradation()])
def test_the_image_is_not_shifted(astronaut, degradation):
    """No filter or resizing may move it: that would teach a network to."""
    mean = np.mean([degradation(astronaut, 2, numbers(seed)) for seed in range(60)], axis=0)
    smooth = gaussian_kernel(9, (1.5, 1.5), 0.0)
    expected = apply_kernel(bicubic_downscale(astronaut, 2, numbers()), smooth)
    inner = (slice(6, -6), slice(6, -6))
    errors = {
        (down, right): np.square(np.roll(mean, (down, right), (0, 1)) - expected)[inner].mean()
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
    }
    assert min(errors, key=lambda moved: errors[moved]) == (0, 0)


def test_stages_that_do_nothing_leave_the_image(astronaut):
    config = RealDegradationConfig(NOTHING, NOTHING, final_sinc_share=0.0)
    low = RealDegradation(config)(astronaut, 1, numbers())
    # Two JPEG files of quality 100, with color at half the resolution.
    assert np.abs(low - astronaut).mean() < 0.02


def test_photographs_are_a_little_worse_and_some_are_clean(astronaut):
    """Most are JPEGs, none is as far from the clean picture as Real-ESRGAN's are on average."""
    clean = bicubic_downscale(astronaut, 2, numbers())
    errors, strong = (
        [np.abs(one(astronaut, 2, numbers(seed)) - clean).mean() * 255 for seed in range(80)]
        for one in (PhotoDegradation(), RealDegradation())
    )
    assert min(errors) < 0.5 and 2 < np.median(errors) < 6
    assert max(errors) < np.mean(strong)


def test_a_photograph_of_which_nothing_is_lost(astronaut):
    config = PhotoDegradationConfig(blur_share=0, twice_share=0, noise_share=0, jpeg_share=0)
    assert np.array_equal(PhotoDegradation(config)(astronaut, 1, numbers()), astronaut)


def test_chroma_is_kept_where_it_is_not_subsampled(astronaut):
    """At quality 100 nearly all that is lost is chroma's resolution."""
    options = dict(blur_share=0, twice_share=0, noise_share=0, jpeg_share=1, jpeg=(100, 100))
    full, half = (
        PhotoDegradation(PhotoDegradationConfig(**options, full_color_share=share))(
            astronaut, 1, numbers()
        )
        for share in (1, 0)
    )
    assert np.abs(full - astronaut).mean() < 0.5 * np.abs(half - astronaut).mean()


def noisy(**changes):
    """What a round with nothing but noise, of quality 100, adds to flat gray."""
    stage = dict(blur=BlurKernelConfig(share=0.0), resize_shares=(0.0, 0.0, 1.0), jpeg=(100, 100))
    config = RealDegradationConfig(
        DegradationStageConfig(**(stage | changes)), NOTHING, final_sinc_share=0.0
    )
    gray = np.full((128, 128, 3), 0.5, np.float32)
    return RealDegradation(config)(gray, 1, numbers()) - 0.5


def test_noise_has_the_requested_strength():
    gaussian = noisy(gaussian_share=1.0, gray_share=1.0, gaussian=(20.0, 20.0))
    assert gaussian.std() * 255 == pytest.approx(20, rel=0.05)
    poisson = noisy(gaussian_share=0.0, gray_share=1.0, poisson=(2.0, 2.0))
    assert poisson.std() == pytest.approx(2 * math.sqrt(0.5 / 256), rel=0.05)


def test_gray_noise_is_the_same_in_all_bands():
    for gaussian_share in (0.0, 1.0):
        gray, color = (
            noisy(gaussian_share=gaussian_share, gray_share=share, gaussian=(20.0, 20.0))
            for share in (1.0, 0.0)
        )
        assert np.abs(gray - gray.mean(2, keepdims=True)).mean() < 0.004
        assert np.abs(color - color.mean(2, keepdims=True)).mean() > 0.01


def test_kernels_sum_to_1_and_are_symmetric():
    for name in KERNELS:
        kernel = KERNELS[name]
        assert kernel.sum() == pytest.approx(1)
        assert kernel[::-1, ::-1] == pytest.approx(kernel)
        is_round = np.allclose(kernel, kernel.T) and np.allclose(kernel, kernel[::-1])
        assert is_round == ("stretched" not in name)


def test_every_kernel_drawn_sums_to_1():
    sizes = set()
    for seed in range(200):
        kernel = draw_kernel(BlurKernelConfig(), numbers(seed))
        sizes.add(kernel.shape)
        assert np.isfinite(kernel).all() and kernel.sum() == pytest.approx(1)
        assert kernel[::-1, ::-1] == pytest.approx(kernel)
    assert sizes == {(size, size) for size in range(7, 22, 2)}


def test_a_gaussian_has_the_width_along_its_angle():
    """With an angle of 0 the first width runs along the rows, with a quarter turn across them."""
    for angle, widths in ((0.0, (1.0, 2.5)), (math.pi / 2, (2.5, 1.0))):
        kernel = gaussian_kernel(21, (2.5, 1.0), angle)
        across = np.arange(21) - 10
        variances = [(kernel.sum(1 - axis) * across**2).sum() for axis in (0, 1)]
        assert np.sqrt(variances) == pytest.approx(widths, rel=0.01)


def test_shapes_are_what_they_are_called():
    plain = gaussian_kernel(21, (2.0, 2.0), 0.0)
    assert gaussian_kernel(21, (2.0, 2.0), 0.0, "generalized", 1.0) == pytest.approx(plain)
    flat = gaussian_kernel(21, (4.0, 4.0), 0.0, "plateau", 4.0)
    assert flat[10, 10] == pytest.approx(flat[10, 11], rel=1e-3)
    assert (sinc_kernel(21, math.pi / 2) < 0).any() and (plain > 0).all()


def test_filters_are_convolutions(astronaut):
    kernel = np.random.default_rng(0).random((7, 7))
    seen = apply_kernel(astronaut[:30, :20], kernel)
    around = np.pad(astronaut[:30, :20], ((3, 3), (3, 3), (0, 0)), "reflect")
    windows = np.lib.stride_tricks.sliding_window_view(around, (7, 7), (0, 1))
    assert seen == pytest.approx(np.einsum("hwcij,ij->hwc", windows, kernel[::-1, ::-1]), abs=1e-4)
    spot = np.zeros((7, 7))
    spot[3, 3] = 1
    assert apply_kernel(astronaut, spot) == pytest.approx(astronaut, abs=1e-6)


def test_resizing(astronaut):
    for kind in ("area", "bilinear", "bicubic"):
        assert resize_image(astronaut, (96, 96), kind) == pytest.approx(astronaut, abs=1e-6)
        flat = np.full((13, 17, 3), 0.3, np.float32)
        for size in ((5, 6), (40, 19), (1, 1)):
            assert resize_image(flat, size, kind) == pytest.approx(
                np.full((*size, 3), 0.3), abs=1e-6
            )
        ramp = np.linspace(0, 1, 40, dtype=np.float32)[:, None, None].repeat(3, 2)
        # Pixel centers are at half integers.
        assert resize_image(ramp, (10, 1), kind)[2:-2] == pytest.approx(
            ramp.reshape(10, 4, 1, 3).mean(1)[2:-2], abs=1e-5
        )


def test_area_is_a_mean(astronaut):
    halves = resize_image(astronaut, (48, 32), "area")
    assert halves == pytest.approx(astronaut.reshape(48, 2, 32, 3, 3).mean((1, 3)), abs=1e-6)
    part = resize_image(astronaut, (37, 61), "area")
    assert part.mean((0, 1)) == pytest.approx(astronaut.mean((0, 1)), abs=1e-5)


def test_a_lower_quality_is_further_away(astronaut):
    errors = [
        np.square(jpeg_roundtrip(astronaut, quality) - astronaut).mean()
        for quality in (10, 20, 30, 50, 70, 85, 95)
    ]
    assert errors == sorted(errors, reverse=True)
    assert jpeg_roundtrip(astronaut[:5, :7], 50).shape == (5, 7, 3)


def test_changes_are_all_eight_and_colors_change_in_half():
    picture = np.random.default_rng(0).random((6, 6, 3), np.float32)
    turned, recolored = set(), 0
    for seed in range(400):
        change = Augmentation(color=True).draw(np.random.default_rng(seed))
        turned.add((change.hflip, change.quarter_turns))
        recolored += change.color_transform is not None
        made = change.apply(picture)
        assert made.dtype == np.float32 and made.min() >= 0 and made.max() <= 1
    assert len(turned) == 8
    assert 160 < recolored < 240


def test_new_colors_commute_with_a_downscale():
    picture = skimage.data.astronaut()[:64, :64].astype(np.float32) / 255
    for seed in range(20):
        colors = Augmentation(color=True).draw(np.random.default_rng(seed)).color_transform
        if colors is not None:
            before = resize_cubic(colors.apply(picture), 16, 16)
            after = colors.apply(resize_cubic(picture, 16, 16).astype(np.float32))
            assert np.abs(before - after).max() < 1e-5
