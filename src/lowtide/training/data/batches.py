"""Batches of patches that depend on the seed and the step alone, so that training goes on exactly.

Random numbers are those of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), a function of a key and a counter: no state has to be kept or passed between threads.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import InputError, UsageError
from lowtide.training.data.augment import Augmentation

# Batches computed ahead, for each thread.
_AHEAD = 2
# Orders of epochs that are kept: threads work in two of them at most, for a while.
_ORDERS = 4
# Second half of Philox's key: what the numbers are for.
_ORDER, _SAMPLE = 0, 1


class PatchData(Protocol):
    """Pictures that patches can be cut from: `PairedFolders` or `HighResolutionFolders`."""

    scale: int

    def __len__(self) -> int:
        """Number of pictures."""
        ...

    def path(self, index: int) -> Path:
        """A picture's file, for messages."""
        ...

    def check(self, patch: int) -> None:
        """Raise `InputError` for pictures smaller than a patch of ``patch`` LQ pixels."""
        ...

    def pair(
        self, index: int, patch: int, augmentation: Augmentation, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """A random patch, LQ and GT as float32 (H, W, 3) in 0..1; `InputError` if damaged."""
        ...


def philox(seed: int, purpose: int, major: int, minor: int) -> np.random.Generator:
    """Random numbers that are a function of the four, each from 0 to 2**64 - 1."""
    # The lower half of the counter is left to the numbers themselves.
    counter = np.array([0, 0, minor, major], np.uint64)
    key = np.array([seed, purpose], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


class Batches:
    """Batches of ``batch`` patches of ``patch`` LQ pixels on a side, by their step.

    All pictures are visited in an order that is shuffled anew in each epoch, and one random patch
    is taken at each visit. ``workers`` is the number of threads of `prefetch`. ``use_hflip``,
    ``use_rot`` and ``color`` are those of `Augmentation`. With ``skip_broken`` the next picture
    of the order stands in for one that turns out to be damaged, and ``skipped`` names it and
    says why. Of a batch that several processes make together, ``share`` = (number, of how many) is
    the part that is drawn here; all parts are those of the whole batch in its order.

    Raises `UsageError` for a number that makes no sense, and `InputError` for pictures smaller
    than a patch.
    """

    def __init__(
        self,
        data: PatchData,
        *,
        patch: int,
        batch: int,
        seed: int,
        workers: int = 0,
        use_hflip: bool = True,
        use_rot: bool = True,
        color: bool = False,
        skip_broken: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        for name, value, lowest in (
            ("patch", patch, 1),
            ("batch", batch, 1),
            ("workers", workers, 0),
        ):
            if value < lowest:
                raise UsageError(f"{name} must be {lowest} or more: {value}")
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"seed must be from 0 to 2**64 - 1: {seed}")
        data.check(patch)
        number, count = share
        if batch % count or not 0 <= number < count:
            raise UsageError(f"a batch of {batch} has no part {number} of {count}")
        self._places = range(number * batch // count, (number + 1) * batch // count)
        self.data, self.patch, self.batch, self.workers = data, patch, batch, workers
        self.skipped: dict[Path, str] = {}
        self._seed, self._skip_broken = seed, skip_broken
        self._augmentation = Augmentation(use_hflip, use_rot, color)
        self._order = functools.lru_cache(_ORDERS)(self._shuffled)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """LQ (batch, 3, patch, patch) and GT (batch, 3, patch * scale, ...), float32 in 0..1, or
        the share of them.

        ``step`` counts from 0, and the same one gives the same bits. Raises `InputError` naming
        a file that is damaged, or with ``skip_broken`` if no other is left.
        """
        pairs = [self._sample(step, place) for place in self._places]
        low, high = (np.stack(side).transpose(0, 3, 1, 2) for side in zip(*pairs, strict=True))
        return _tensor(low), _tensor(high)

    def prefetch(self, first_step: int) -> Generator[tuple[Tensor, Tensor]]:
        """Batches from ``first_step`` on, without end, as `at` gives them and in its order.

        Threads compute up to two batches each ahead. What one raises is raised where its batch
        is due. Closing the generator waits for the batches being computed.
        """
        steps = count(first_step)
        if self.workers == 0:
            yield from map(self.at, steps)  # without end
        pool = ThreadPoolExecutor(self.workers, "lowtide-batches")
        ahead: deque[Future[tuple[Tensor, Tensor]]] = deque()
        try:
            while True:
                while len(ahead) < _AHEAD * self.workers:
                    ahead.append(pool.submit(self.at, next(steps)))
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return philox(self._seed, _ORDER, epoch, 0).permutation(len(self.data))

    def _index(self, step: int, place: int, further: int) -> int:
        """The picture of a sample, or the one that is ``further`` on in the epoch's order."""
        epoch, position = divmod(step * self.batch + place, len(self.data))
        return int(self._order(epoch)[(position + further) % len(self.data)])

    def _sample(self, step: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        for further in range(len(self.data)):
            index = self._index(step, place, further)
            # Numbers from the beginning for each: those a damaged file used do not count.
            generator = philox(self._seed, _SAMPLE, step, place)
            try:
                return self.data.pair(index, self.patch, self._augmentation, generator)
            except InputError as error:
                if not self._skip_broken:
                    raise InputError(error.message, hint="mend it, or skip_broken: true") from error
                self.skipped[self.data.path(index)] = error.message
        raise InputError(
            f"none of the {len(self.data):,} training images can be read: "
            f"{next(iter(self.skipped.values()))}"
        )


def _tensor(images: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(images))
