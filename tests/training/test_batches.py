"""Batches: the same for the same seed and step, in any order and with any number of threads."""

import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch

from lowtide import InputError, UsageError
from lowtide.training.data.augment import Augmentation
from lowtide.training.data.batches import BatchLoader
from lowtide.training.data.degrade import RealDegradation, bicubic_downscale
from lowtide.training.data.image_cache import ImageCache
from lowtide.training.data.pairs import HighResolutionFolders, PairedImageFolders, PatchSamples

COUNT = 7


@pytest.fixture
def folder(tmp_path, save):
    """Pictures of one level each, 10 x its number, so that a patch says where it is from."""
    for number in range(COUNT):
        save(tmp_path / "gt" / f"{number}.png", np.full((48, 40, 3), 10 * number, np.uint8))
    return tmp_path / "gt"


@pytest.fixture
def noises(tmp_path, save):
    for number in range(COUNT):
        picture = np.random.default_rng(number).integers(0, 256, (48, 40, 3)).astype(np.uint8)
        save(tmp_path / "noises" / f"{number}.png", picture)
    return tmp_path / "noises"


def batches(folder, *, degradation=bicubic_downscale, cache=None, **changes):
    data = HighResolutionFolders([folder], 2, degradation, cache=cache)
    names = {"use_hflip": "hflip", "use_rot": "rot", "color": "color"}
    drawn = {new: changes.pop(old) for old, new in names.items() if old in changes}
    patches = PatchSamples(data, changes.pop("patch", 8), Augmentation(**drawn))
    return BatchLoader(patches, **(dict(batch=3, seed=5) | changes))


def numbers_of(batch):
    """Which pictures a batch is from."""
    return (batch[1][:, 0, 0, 0] * 25.5).round().int().tolist()


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_shapes(noises):
    low, high = batches(noises).at(0)
    assert low.shape == (3, 3, 8, 8) and high.shape == (3, 3, 16, 16)
    assert low.dtype == high.dtype == torch.float32
    assert low.is_contiguous() and high.is_contiguous()
    assert low.min() >= 0 and high.max() <= 1


@pytest.mark.parametrize("degradation", [bicubic_downscale, RealDegradation()])
def test_a_step_is_the_same_whenever_it_comes(noises, degradation):
    changes = dict(degradation=degradation, color=True)
    one = batches(noises, **changes)
    first = one.at(7)
    for step in (3, 8, 0):
        assert not same(one.at(step), first)
    assert same(one.at(7), first)
    other = batches(noises, cache=ImageCache(0), **changes)
    other.at(2)
    assert same(other.at(7), first)
    assert not same(batches(noises, seed=6, **changes).at(7), first)


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_threads_change_nothing(noises, workers):
    changes = dict(degradation=RealDegradation(), color=True)
    expected = [batches(noises, **changes).at(step) for step in range(4, 12)]
    ahead = batches(noises, workers=workers, **changes).prefetch(4)
    assert all(same(*both) for both in zip(expected, islice(ahead, 8), strict=True))
    ahead.close()


def test_the_samples_of_a_batch_differ(tmp_path, save):
    save(tmp_path / "a.png", np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    low, _ = batches(tmp_path, batch=8).at(0)
    assert len({sample.numpy().tobytes() for sample in low}) == 8


def test_every_epoch_visits_each_image_once(folder):
    for batch in (1, 3, 7, 16):
        one = batches(folder, batch=batch)
        steps = -(-5 * COUNT // batch)
        visited = [number for step in range(steps) for number in numbers_of(one.at(step))]
        epochs = [visited[first : first + COUNT] for first in range(0, 5 * COUNT, COUNT)]
        assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_pairs_keep_their_places(tmp_path, save):
    for number in range(3):
        low = np.random.default_rng(number).integers(0, 256, (20, 24, 3)).astype(np.uint8)
        save(tmp_path / "lq" / f"{number}.png", low)
        save(tmp_path / "gt" / f"{number}.png", low.repeat(3, 0).repeat(3, 1))
    data = PairedImageFolders([tmp_path / "gt"], [tmp_path / "lq"], 3)
    patches = PatchSamples(data, 9, Augmentation(color=True))
    for lq, gt in islice(BatchLoader(patches, batch=4, seed=0).prefetch(0), 10):
        assert torch.equal(gt[..., ::3, ::3], lq)


def test_without_changes_nothing_is_turned(tmp_path, save):
    """Levels rise to the right and down, and would not after any turn."""
    y, x = np.mgrid[0:40, 0:40]
    save(tmp_path / "a.png", np.stack([2 * y + x] * 3, 2).astype(np.uint8))
    plain = batches(tmp_path, batch=16, use_hflip=False, use_rot=False).at(0)[1]
    assert (plain.diff(dim=2) > plain.diff(dim=3).mean()).all() and (plain.diff(dim=3) > 0).all()
    mirrored = batches(tmp_path, batch=16, use_rot=False).at(0)[1]
    assert (mirrored.diff(dim=2) > 0).all()
    assert 0 < (mirrored.diff(dim=3) < 0).all((1, 2, 3)).sum() < 16


def damage(path):
    path.write_bytes(path.read_bytes()[:-40])


def batch_with(one, number):
    return next(step for step in range(COUNT) if number in numbers_of(one.at(step)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_file_is_named(folder, workers):
    one = batches(folder, workers=workers, cache=ImageCache(0))
    step = batch_with(one, 4)
    damage(folder / "4.png")
    ahead = one.prefetch(0)
    assert len(list(islice(ahead, step))) == step
    with pytest.raises(InputError, match=r"4\.png: damaged or cut short") as caught:
        next(ahead)
    assert "skip_broken" in str(caught.value.hint)
    assert not one.skipped


def test_another_image_replaces_a_damaged_one(folder):
    def fresh():
        return batches(folder, skip_broken=True, cache=ImageCache(0))

    whole = [numbers_of(fresh().at(step)) for step in range(14)]
    damage(folder / "4.png")
    one = fresh()
    seen = [one.at(step) for step in range(14)]
    assert list(one.skipped) == [folder / "4.png"]
    assert "4.png: damaged or cut short" in one.skipped[folder / "4.png"]
    order = [number for numbers in whole for number in numbers]
    for place, number in enumerate(number for batch in seen for number in numbers_of(batch)):
        if order[place] != 4:
            assert number == order[place]
        else:
            first = place // COUNT * COUNT
            assert number == order[first + (place - first + 1) % COUNT]
    # Whether it was met before or not, and by whom.
    assert all(same(fresh().at(step), seen[step]) for step in (13, 5))
    ahead = BatchLoader(one.samples, batch=3, seed=5, skip_broken=True, workers=2).prefetch(0)
    assert all(same(*both) for both in zip(seen, islice(ahead, 14), strict=True))


def test_not_one_file_is_left(folder):
    one = batches(folder, skip_broken=True)
    for path in folder.iterdir():
        damage(path)
    with pytest.raises(InputError, match=r"none of the 7 training files can be read: .*\.png"):
        one.at(0)
    assert len(one.skipped) == COUNT


def running():
    return [one for one in threading.enumerate() if one.name.startswith("lowtide-batches")]


def test_threads_end_with_the_iterator(noises):
    ahead = batches(noises, workers=3).prefetch(0)
    assert not running()
    next(ahead)
    assert 1 <= len(running()) <= 3
    ahead.close()
    assert not running()


def test_threads_end_with_an_exception(folder):
    one = batches(folder, workers=2, cache=ImageCache(0))
    for path in folder.iterdir():
        damage(path)
    ahead = one.prefetch(0)
    with pytest.raises(InputError):
        next(ahead)
    assert not running()


def test_no_more_is_computed_ahead_than_two_for_each_thread(folder):
    steps = []

    def noted(gt, scale, generator):
        steps.append(0)
        return bicubic_downscale(gt, scale, generator)

    ahead = batches(folder, workers=2, batch=1, degradation=noted).prefetch(0)
    next(ahead)
    time.sleep(0.3)
    assert len(steps) <= 4
    ahead.close()


def test_numbers_that_make_no_sense(folder):
    for changes, said in (
        (dict(patch=0), "patch must be 1 or more: 0"),
        (dict(batch=0), "batch must be 1 or more: 0"),
        (dict(workers=-1), "workers must be 0 or more: -1"),
        (dict(seed=-1), "seed must be from 0"),
        (dict(seed=1 << 64), "seed must be from 0"),
    ):
        with pytest.raises(UsageError, match=said):
            batches(folder, **changes)


def test_a_patch_larger_than_the_images(folder):
    with pytest.raises(InputError, match=r"(?s)7 problems.*0\.png: 40 x 48 pixels.*and 2 more"):
        batches(folder, patch=21)
