"""Data sets: what they find, what they refuse and in which words, and what they cut."""

import numpy as np
import pytest
import skimage.data

from lowtide import ImageError, InputError, UsageError
from lowtide.models.resample import resize_cubic
from lowtide.training.data.augment import Augmentation
from lowtide.training.data.degrade import bicubic_downscale
from lowtide.training.data.image_cache import ImageCache, image_size, read_rgb
from lowtide.training.data.pairs import HighResolutionFolders, PairedImageFolders

STILL = Augmentation(hflip=False, rot=False)
EVERYTHING = Augmentation(color=True)


def noise(height, width, bands=3, seed=0, dtype=np.uint8):
    levels = np.iinfo(dtype).max + 1
    return np.random.default_rng(seed).integers(0, levels, (height, width, bands), dtype)


@pytest.fixture
def folders(tmp_path, save):
    """Three pairs of scale 2 in two levels of folders."""
    gt, lq = tmp_path / "gt", tmp_path / "lq"
    for number, name in enumerate(("a", "b.c", "deep/d")):
        picture = noise(40 + 2 * number, 48, seed=number)
        save(gt / f"{name}.png", picture)
        save(lq / f"{name}x2.png", picture[::2, ::2])
    return gt, lq


def paired(folders, scale=2, template="{}x2"):
    return PairedImageFolders([folders[0]], [folders[1]], scale, template)


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_file_is_read_as_it_is_stored(tmp_path, save):
    for dtype in (np.uint8, np.uint16):
        picture = noise(17, 33, dtype=dtype)
        path = save(tmp_path / "a.png", picture)
        seen = read_rgb(path)
        assert seen.dtype == dtype and np.array_equal(seen, picture)
        assert image_size(path) == (17, 33)


def test_gray_and_alpha_are_taken_only_where_that_is_said(tmp_path, save):
    gray = save(tmp_path / "gray.png", noise(8, 9, 1))
    with pytest.raises(ImageError, match=r"gray\.png: it is grayscale \(channels: 1\)"):
        read_rgb(gray)
    assert np.array_equal(read_rgb(gray, gray="convert"), np.repeat(noise(8, 9, 1), 3, 2))
    clear = save(tmp_path / "clear.png", noise(8, 9, 4))
    with pytest.raises(ImageError, match=r"clear\.png: it has an alpha channel"):
        read_rgb(clear, gray="convert")
    assert np.array_equal(read_rgb(clear, alpha="drop"), noise(8, 9, 4)[..., :3])


def test_floats_are_refused(tmp_path, save):
    path = save(tmp_path / "float.tif", np.zeros((8, 8, 3), np.float32))
    with pytest.raises(ImageError, match=r"float\.tif: its samples are 32-bit floats"):
        read_rgb(path)


def test_a_photograph_on_its_side_is_turned(tmp_path):
    import pyvips

    image = pyvips.Image.new_from_array(noise(16, 24)).copy()
    image.set_type(pyvips.GValue.gint_type, "orientation", 6)
    image.jpegsave(str(tmp_path / "a.jpg"), Q=95)
    assert read_rgb(tmp_path / "a.jpg").shape == (24, 16, 3)
    assert image_size(tmp_path / "a.jpg") == (24, 16)


def test_the_cache_keeps_what_was_used_last(tmp_path, save):
    paths = [save(tmp_path / f"{seed}.png", noise(10, 10, seed=seed)) for seed in range(3)]
    cache = ImageCache(limit_bytes=2 * 300)
    first, _ = cache.read(paths[0]), cache.read(paths[1])
    assert cache.read(paths[0]) is first and not first.flags.writeable
    cache.read(paths[2])
    assert cache.cached_bytes == 600
    paths[0].unlink(), paths[1].unlink()
    assert cache.read(paths[0]) is first
    with pytest.raises(ImageError, match=r"1\.png: no such file"):
        cache.read(paths[1])


def test_an_image_larger_than_the_cache_is_not_cached(tmp_path, save):
    cache = ImageCache(limit_bytes=299)
    assert cache.read(save(tmp_path / "a.png", noise(10, 10))).shape == (10, 10, 3)
    assert cache.cached_bytes == 0


def test_both_sides_of_a_pair_show_the_same_place(tmp_path, save):
    """Every GT pixel of one LQ pixel is alike, so that turned and mirrored ones still match."""
    for scale in (1, 2, 3, 4):
        for augmentation in (STILL, Augmentation(), EVERYTHING):
            low = noise(20, 27)
            save(tmp_path / "lq" / "a.png", low)
            save(tmp_path / "gt" / "a.png", low.repeat(scale, 0).repeat(scale, 1))
            data = paired((tmp_path / "gt", tmp_path / "lq"), scale, "{}")
            seen = set()
            for seed in range(30):
                lq, gt = data.sample(0, 12, augmentation, np.random.default_rng(seed))
                assert lq.shape == (12, 12, 3) and gt.shape == (12 * scale, 12 * scale, 3)
                assert lq.dtype == gt.dtype == np.float32 and lq.min() >= 0 and lq.max() <= 1
                assert np.array_equal(gt[::scale, ::scale], lq)
                assert np.array_equal(gt, lq.repeat(scale, 0).repeat(scale, 1))
                seen.add(lq.tobytes())
            assert len(seen) > 20


def test_patches_come_from_everywhere_in_the_image(tmp_path, save):
    y, x = np.mgrid[0:20, 0:30]
    picture = np.stack([y, x, 0 * x], 2).astype(np.uint8)
    save(tmp_path / "gt" / "a.png", picture), save(tmp_path / "lq" / "a.png", picture)
    data = paired((tmp_path / "gt", tmp_path / "lq"), 1, "{}")
    corners = set()
    for seed in range(2000):
        lq, _ = data.sample(0, 16, STILL, np.random.default_rng(seed))
        corners.add(tuple(np.rint(lq[0, 0, :2] * 255).astype(int).tolist()))
    assert corners == {(top, left) for top in range(5) for left in range(15)}


def test_16_bit_pairs(tmp_path, save):
    picture = noise(24, 24, dtype=np.uint16)
    save(tmp_path / "gt" / "a.png", picture), save(tmp_path / "lq" / "a.png", picture[::2, ::2])
    data = paired((tmp_path / "gt", tmp_path / "lq"), 2, "{}")
    lq, gt = data.sample(0, 12, STILL, np.random.default_rng(0))
    assert np.array_equal(gt, picture.astype(np.float32) / np.float32(65535))
    assert np.array_equal(gt[::2, ::2], lq)


def test_pairs_are_found_by_name_whatever_the_format(folders, save):
    (folders[1] / "ax2.png").unlink()
    save(folders[1] / "ax2.tif", noise(20, 24))
    save(folders[0] / ".hidden.png", noise(20, 24))
    (folders[0] / "notes.txt").write_text("none")
    data = paired(folders)
    names = [data.path(index).relative_to(folders[0]).as_posix() for index in range(len(data))]
    assert names == ["a.png", "b.c.png", "deep/d.png"]


def test_each_gt_folder_has_its_own_lq_folder(tmp_path, save):
    for number in range(2):
        save(tmp_path / f"gt{number}" / "a.png", noise(16, 16, seed=number))
        save(tmp_path / f"lq{number}" / "a.png", noise(16, 16, seed=number))
    gt, lq = ([tmp_path / f"{side}{n}" for n in range(2)] for side in ("gt", "lq"))
    data = PairedImageFolders(gt, lq, 1)
    for index in range(2):
        low, high = data.sample(index, 16, STILL, np.random.default_rng(0))
        assert np.array_equal(low, high)
    with pytest.raises(UsageError, match="2 folders of GT and 1 of LQ"):
        PairedImageFolders(gt, lq[:1], 1)


def test_all_errors_are_reported_at_once(folders, save):
    gt, lq = folders
    (lq / "deep" / "dx2.png").unlink()
    save(lq / "strayx2.png", noise(9, 9))
    save(gt / "size.png", noise(33, 40)), save(lq / "sizex2.png", noise(16, 20))
    save(gt / "gray.png", noise(32, 40, 1)), save(lq / "grayx2.png", noise(16, 20))
    save(gt / "cut.png", noise(32, 40)), (lq / "cutx2.png").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        paired(folders)
    message = caught.value.message
    assert message.startswith("5 problems")
    for problem in (
        f"{gt / 'deep' / 'd.png'}: has no LQ file",
        f"{lq / 'strayx2.png'}: has no GT file",
        f"{gt / 'size.png'}: 40 x 33 pixels is not 2 times {lq / 'sizex2.png'}: 20 x 16 pixels",
        f"{gt / 'gray.png'}: it is grayscale",
        f"{lq / 'cutx2.png'}: the file is empty",
    ):
        assert problem in message
    assert caught.value.hint is not None


def test_many_problems_are_counted(folders, save):
    for number in range(1200):
        (folders[1] / f"{number:04}.png").touch()
    with pytest.raises(
        InputError, match=r"(?s)1,200 problems.*0004\.png.*and 1,195 more"
    ) as caught:
        paired(folders)
    assert "0005.png" not in caught.value.message


def test_one_name_twice(folders, save):
    twice = save(folders[1] / "ax2.jpg", noise(20, 24))
    with pytest.raises(InputError, match=r"a\.png: has 2 LQ files") as caught:
        paired(folders)
    assert str(twice) in caught.value.message
    twice.unlink()
    save(folders[0] / "a.tif", noise(40, 48))
    with pytest.raises(
        InputError, match=r"a\.tif: its LQ file .*ax2\.png is also that of .*a\.png"
    ):
        paired(folders)


def test_a_template_without_a_place_for_the_name(folders):
    for template in ("x2", "{}{}", "{name}"):
        with pytest.raises(UsageError, match="filename_tmpl"):
            paired(folders, template=template)


def test_folders_without_images(tmp_path, folders):
    (tmp_path / "empty").mkdir()
    for name, said in (("none", "none: no such folder"), ("empty", "empty: no images")):
        with pytest.raises(InputError, match=said):
            PairedImageFolders([folders[0]], [tmp_path / name], 2)
        with pytest.raises(InputError, match=said):
            HighResolutionFolders([tmp_path / name], 2, bicubic_downscale)


def test_images_smaller_than_a_patch(folders, save):
    save(folders[0] / "low.png", noise(32, 60)), save(folders[1] / "lowx2.png", noise(16, 30))
    data, single = paired(folders), HighResolutionFolders([folders[0]], 2, bicubic_downscale)
    data.check_patch_size(16), single.check_patch_size(16)
    with pytest.raises(InputError, match=r"1 problem .*\n.*lowx2\.png: 30 x 16 pixels .* 20 x 20"):
        data.check_patch_size(20)
    with pytest.raises(InputError, match=r"1 problem .*\n.*low\.png: 60 x 32 pixels .* 40 x 40"):
        single.check_patch_size(20)


def test_a_file_that_breaks_later(folders, save):
    data = paired(folders)
    cut_short(folders[1] / "ax2.png")
    save(folders[0] / "b.c.png", noise(50, 48))
    with pytest.raises(InputError, match=r"ax2\.png: damaged or cut short"):
        data.sample(0, 8, STILL, np.random.default_rng(0))
    with pytest.raises(InputError, match=r"b\.c\.png: 48 x 50 pixels, but 48 x 42"):
        data.sample(1, 8, STILL, np.random.default_rng(0))


def test_high_resolution_files_that_cannot_be_used(folders, save):
    save(folders[0] / "gray.png", noise(32, 40, 1))
    save(folders[0] / "clear.png", noise(32, 40, 4))
    (folders[0] / "text.png").write_text("no image")
    with pytest.raises(InputError, match="3 problems") as caught:
        HighResolutionFolders([folders[0]], 2, bicubic_downscale)
    assert all(f"{name}.png: " in caught.value.message for name in ("gray", "clear", "text"))


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_a_patch_is_that_of_the_downscaled_whole_image(tmp_path, save, scale):
    """What lies around a patch is seen by the filter, and the picture's borders are its own."""
    photo = skimage.data.astronaut()[100:163, 100:170]
    save(tmp_path / "a.png", photo)
    rows, columns = photo.shape[0] // scale, photo.shape[1] // scale
    high = photo[: rows * scale, : columns * scale]
    whole = resize_cubic(high, rows, columns).astype(np.float32) / np.float32(255)
    data = HighResolutionFolders([tmp_path], scale, bicubic_downscale)
    # A photograph of 15 or more LQ pixels: patches of 12 touch its borders now and then.
    for seed in range(25):
        lq, gt = data.sample(0, 12, STILL, np.random.default_rng(seed))
        numbers = np.random.default_rng(seed)
        top, left = (int(numbers.integers(side - 12 + 1)) for side in (rows, columns))
        assert np.array_equal(lq, whole[top : top + 12, left : left + 12])
        cut = high[top * scale : (top + 12) * scale, left * scale : (left + 12) * scale]
        assert np.array_equal(gt, cut.astype(np.float32) / np.float32(255))


def test_16_bit_images_are_downscaled(tmp_path, save):
    wide = skimage.data.coffee()[:64, :64].astype(np.uint16) * 257
    save(tmp_path / "a.png", wide)
    data = HighResolutionFolders([tmp_path], 4, bicubic_downscale)
    lq, gt = data.sample(0, 16, STILL, np.random.default_rng(0))
    assert np.array_equal(gt, wide.astype(np.float32) / np.float32(65535))
    expected = resize_cubic(skimage.data.coffee()[:64, :64], 16, 16)
    assert np.array_equal(np.rint(lq * 255), expected)
