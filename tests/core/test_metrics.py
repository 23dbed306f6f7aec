from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from lowtide.core.metrics import luma_bt601, max_error, psnr, psnr_y, ssim, ssim_y


def test_psnr_by_hand() -> None:
    black, gray = np.zeros((4, 5)), np.full((4, 5), 0.1)
    assert psnr(black, gray) == pytest.approx(20.0)
    assert psnr(black, gray * 255, peak=255) == pytest.approx(20.0)
    assert psnr(gray, gray) == math.inf


def test_unsigned_samples_do_not_wrap() -> None:
    low, high = np.array([[0]], np.uint8), np.array([[255]], np.uint8)
    assert psnr(low, high, peak=255) == psnr(high, low, peak=255) == pytest.approx(0.0)
    assert max_error(low, high) == max_error(high, low) == 255.0


def test_a_nan_is_never_a_good_score() -> None:
    broken = np.array([[0.0, math.nan]])
    assert math.isnan(psnr(broken, np.zeros((1, 2))))
    assert math.isnan(max_error(broken, np.zeros((1, 2))))


def test_luma_of_the_corners() -> None:
    colors = np.array([[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
    assert luma_bt601(colors) == pytest.approx([16, 235, 81.481, 144.553, 40.966])


def test_psnr_y() -> None:
    high = np.full((10, 12, 3), 100, np.uint8)
    sr = high.copy()
    sr[0], sr[-1], sr[:, 0], sr[:, -1] = 0, 0, 0, 0
    assert psnr_y(sr, high, crop=1) == math.inf
    assert psnr_y(sr, high, crop=0) < 30
    step = 219 / 255
    assert psnr_y(high + 1, high, 2) == pytest.approx(20 * math.log10(255 / step))


def test_images_that_cannot_be_compared() -> None:
    high = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(ValueError, match="shape"):
        psnr(high, high[:4])
    with pytest.raises(ValueError, match="empty"):
        max_error(high[:0], high[:0])
    with pytest.raises(ValueError, match="peak"):
        psnr(high, high, peak=0)
    with pytest.raises(ValueError, match="uint8"):
        psnr_y(high / 255.0, high, 0)
    with pytest.raises(ValueError, match="crop of 4"):
        psnr_y(high, high, 4)
    with pytest.raises(ValueError, match="shape"):
        psnr_y(high[:7], high, 1)
    with pytest.raises(ValueError, match="RGB"):
        luma_bt601(high[..., :1])


def test_importing_is_light() -> None:
    code = "import sys, lowtide.core.metrics; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ssim_is_that_of_scikit_image() -> None:
    from skimage.metrics import structural_similarity

    generator = np.random.default_rng(0)
    for shape in ((11, 11), (23, 40), (17, 31, 3)):
        a = generator.integers(0, 256, shape).astype(np.uint8)
        b = np.clip(a + generator.normal(0, 30, shape), 0, 255).round().astype(np.uint8)
        # Theirs fills up beyond the border; the middle is a single window's, as all of ours are.
        _, found = structural_similarity(
            a,
            b,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=255,
            channel_axis=2 if len(shape) == 3 else None,
            full=True,
        )
        assert ssim(a, b, peak=255) == pytest.approx(found[5:-5, 5:-5].mean(), abs=1e-9)
        assert ssim(a, a, peak=255) == 1.0


def test_ssim_y_is_of_the_luma_without_a_border() -> None:
    generator = np.random.default_rng(1)
    a, b = (generator.integers(0, 256, (30, 26, 3)).astype(np.uint8) for _ in range(2))
    expected = ssim(luma_bt601(a[2:-2, 2:-2]), luma_bt601(b[2:-2, 2:-2]), peak=255)
    assert ssim_y(a, b, 2) == expected
    b[0] = 255 - b[0]
    assert ssim_y(a, b, 2) == expected


def test_ssim_of_less_than_a_window() -> None:
    with pytest.raises(ValueError, match="window of 11"):
        ssim(np.zeros((10, 30)), np.zeros((10, 30)))
