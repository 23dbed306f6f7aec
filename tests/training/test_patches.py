"""Patches are a function of seed, step and place, and both sides of a pair fit each other."""

from collections import Counter

import numpy as np
import pytest
import pyvips
import torch

from lowtide.core.errors import InputError, UsageError
from lowtide.models.resample import resize_cubic
from lowtide.training.data import Batches, HighResolutionFolders, PairedFolders, bicubic
from lowtide.training.data.degrade import RealDegradation


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyvips.Image.new_from_array(image).pngsave(str(path))
    return path


@pytest.fixture
def folders(tmp_path):
    """Seven pictures whose small sides are every second pixel, by number in the first band."""
    generator = np.random.default_rng(0)
    for number in range(7):
        high = generator.integers(0, 256, (40 + 2 * number, 52, 3), np.uint8)
        high[..., 0] = number
        save(tmp_path / f"hr/{number}.png", high)
        save(tmp_path / f"lr/{number}x2.png", np.ascontiguousarray(high[::2, ::2]))
    return tmp_path


def pairs(folders):
    return PairedFolders([folders / "hr"], [folders / "lr"], 2, "{}x2")


def batches(folders, **more):
    return Batches(pairs(folders), **{"patch": 8, "batch": 3, "seed": 5, **more})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_is_the_same_whenever_it_is_asked_for(folders, workers):
    one, other = batches(folders, workers=workers), batches(folders)
    ahead = one.prefetch(4)
    for step in (4, 5, 6, 7):
        for found, wanted in zip(next(ahead), other.at(step), strict=True):
            assert torch.equal(found, wanted)
    ahead.close()
    assert not torch.equal(one.at(3)[0], one.at(4)[0])
    assert not torch.equal(one.at(3)[0], batches(folders, seed=6).at(3)[0])


def test_both_sides_are_of_the_same_place_however_they_are_turned(folders):
    data, turned = batches(folders), set()
    for step in range(12):
        low, high = data.at(step)
        assert low.shape == (3, 3, 8, 8) and high.shape == (3, 3, 16, 16)
        for small, large in zip(low, high, strict=True):
            corners = [large[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
            same = [torch.equal(small, corner) for corner in corners]
            assert sum(same) == 1
            turned.add(same.index(True))
    # Where the kept pixel of four lies tells how the patch was turned.
    assert turned == {0, 1, 2, 3}


def test_an_epoch_has_every_picture_once(folders):
    data = batches(folders, batch=7, color=False)
    orders = []
    for epoch in range(3):
        low, _ = data.at(epoch)
        seen = (low[:, 0, 0, 0] * 255).round().int().tolist()
        assert Counter(seen) == Counter(range(7))
        orders.append(seen)
    assert orders[0] != orders[1]


def test_without_turning_pixels_stay_where_they_are(folders):
    data = batches(folders, use_hflip=False, use_rot=False)
    for step in range(5):
        low, high = data.at(step)
        assert torch.equal(low, high[:, :, ::2, ::2])


def test_small_sides_are_made_as_of_the_whole_picture(folders):
    """The filter sees the picture go on beyond the patch, and mirrored at its borders."""
    data = HighResolutionFolders([folders / "hr"], 2, bicubic)
    made = Batches(data, patch=8, batch=2, seed=1, use_hflip=False, use_rot=False)
    wholes = {}
    for number in range(7):
        image = pyvips.Image.new_from_file(str(folders / f"hr/{number}.png")).numpy()
        wholes[number] = image, resize_cubic(image, image.shape[0] // 2, 26)
    for step in range(4):
        low, high = made.at(step)
        for small, large in zip(low, high, strict=True):
            number = round(large[0, 0, 0].item() * 255)
            image, whole = wholes[number]
            patch = (large.permute(1, 2, 0) * 255).round().byte().numpy()
            (top, left), = [
                (y, x) for y in range(0, image.shape[0] - 15, 2) for x in range(0, 37, 2)
                if np.array_equal(image[y : y + 16, x : x + 16], patch)
            ]
            wanted = whole[top // 2 : top // 2 + 8, left // 2 : left // 2 + 8]
            found = (small.permute(1, 2, 0) * 255).round().byte().numpy()
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_real_degradations_have_the_size_and_range_of_an_image(scale):
    high = np.random.default_rng(0).random((24 * scale, 20 * scale, 3)).astype(np.float32)
    degrade = RealDegradation()
    for seed in range(6):
        low = degrade(high, scale, np.random.default_rng(seed))
        assert low.shape == (24, 20, 3) and low.dtype == np.float32
        assert low.min() >= 0 and low.max() <= 1
        again = degrade(high, scale, np.random.default_rng(seed))
        assert np.array_equal(low, again)
        assert not np.allclose(low, bicubic(high, scale, np.random.default_rng(0)), atol=0.02)


def test_a_broken_file_is_named_or_left_out(folders):
    data, left = batches(folders), batches(folders, skip_broken=True)
    (folders / "hr/3.png").write_bytes((folders / "hr/3.png").read_bytes()[:900])
    with pytest.raises(InputError, match=r"3\.png"):
        for step in range(5):
            data.at(step)
    for step in range(5):
        low, _ = left.at(step)
        assert low.isfinite().all()
    assert [path.name for path in left.skipped] == ["3.png"]


def test_pairs_that_do_not_fit_are_all_named(folders):
    save(folders / "hr/alone.png", np.zeros((40, 40, 3), np.uint8))
    save(folders / "lr/8x2.png", np.zeros((20, 20, 3), np.uint8))
    save(folders / "lr/0x2.png", np.zeros((19, 26, 3), np.uint8))
    save(folders / "hr/1.png", np.zeros((42, 52), np.uint8))
    with pytest.raises(InputError) as caught:
        pairs(folders)
    for name in ("alone.png", "8x2.png", "0x2.png", "1.png"):
        assert name in str(caught.value)


def test_what_makes_no_sense_is_refused(folders):
    with pytest.raises(InputError, match=r"0x2\.png"):
        batches(folders, patch=30)
    with pytest.raises(UsageError, match="batch"):
        batches(folders, batch=0)
    with pytest.raises(UsageError, match="filename_tmpl"):
        PairedFolders([folders / "hr"], [folders / "lr"], 2, "x2")
