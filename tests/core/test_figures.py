from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from lowtide.core.figures import luma_bt601, max_error, psnr, psnr_y


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


def test_what_cannot_be_compared() -> None:
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
    code = "import sys, lowtide.core.figures; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
