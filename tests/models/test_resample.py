from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lowtide.models.resample import keys_cubic, polyphase_taps, resize_cubic


def test_kernel() -> None:
    points = keys_cubic(np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, -0.5]))
    assert points == pytest.approx([1, 0.5625, 0, -0.0625, 0, 0, 0.5625])


@pytest.mark.parametrize("scale", [1, 2, 3, 4, 8])
def test_taps_are_the_enlargement(scale: int) -> None:
    taps = polyphase_taps(scale)
    assert taps.shape == (scale, 5)
    assert taps.sum(axis=1) == pytest.approx(1)
    assert taps[::-1, ::-1] == pytest.approx(taps)
    line = np.random.default_rng(0).random((20, 1))
    whole = resize_cubic(line, 20 * scale, 1)[:, 0]
    for index in range(2, 18):
        made = taps @ line[index - 2 : index + 3, 0]
        assert made == pytest.approx(whole[index * scale : (index + 1) * scale])


def test_size_one_and_identity() -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    assert np.array_equal(resize_cubic(image, 9, 7), image)
    assert resize_cubic(image[:1, :1], 4, 4).tolist() == [[image[0, 0].tolist()] * 4] * 4
    assert resize_cubic(image, 1, 1).shape == (1, 1, 3)
    with pytest.raises(ValueError, match="resize"):
        resize_cubic(image, 0, 4)


def test_constant_and_ramp_survive() -> None:
    flat = np.full((30, 40), 0.3)
    assert resize_cubic(flat, 13, 17) == pytest.approx(np.full((13, 17), 0.3))
    ramp = np.tile(np.arange(40.0), (10, 1))
    small = resize_cubic(ramp, 10, 20)[:, 4:-4]
    assert small == pytest.approx(np.tile(2 * np.arange(20.0)[4:-4] + 0.5, (10, 1)))


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_set5_bit_for_bit(data: Path, scale: int) -> None:
    """The published low-resolution files were made by MATLAB."""
    from PIL import Image

    for path in sorted((data / "images" / "set5" / "HR").glob("*.png")):
        low_path = path.parents[1] / "LR_bicubic" / f"X{scale}" / f"{path.stem}x{scale}.png"
        with Image.open(path) as high_file, Image.open(low_path) as low_file:
            high, low = np.array(high_file.convert("RGB")), np.array(low_file.convert("RGB"))
        height, width = low.shape[:2]
        ours = resize_cubic(high[: height * scale, : width * scale], height, width)
        assert np.array_equal(ours, low)
