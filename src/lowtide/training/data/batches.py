"""Batches of random patches, determined by seed and step for exact resumption.

Random numbers come from Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), a function of a key and a counter: no RNG state is saved or shared between threads.
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

# Batches prefetched per thread.
_PREFETCH_PER_WORKER = 2
# Cached shuffles of epochs: threads work in two epochs at most at the same time.
_CACHED_EPOCHS = 4
# Second half of the Philox key: the purpose of the random numbers.
_SHUFFLE_KEY, _SAMPLE_KEY = 0, 1


class PatchData(Protocol):
    """Interface of patch datasets: `PairedFolders` or `HighResolutionFolders`."""

    scale: int

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def path(self, index: int) -> Path:
        """Return the file of an image, for messages."""
        ...

    def check_patch_size(self, patch: int) -> None:
        """Raise `InputError` for images smaller than a patch of ``patch`` LQ pixels."""
        ...

    def sample(
        self, index: int, patch: int, augmentation: Augmentation, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a random augmented patch, LQ and GT as float32 (H, W, 3) in 0..1.

        Raises `InputError` for a damaged file.
        """
        ...


def philox(seed: int, purpose: int, major: int, minor: int) -> np.random.Generator:
    """Return a Philox generator keyed by four integers, each from 0 to 2**64 - 1."""
    # The lower half of the counter counts the numbers drawn.
    counter = np.array([0, 0, minor, major], np.uint64)
    key = np.array([seed, purpose], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


class Batches:
    """Deterministic source of training batches by step, with threaded prefetch.

    All images are visited in an order shuffled anew in each epoch; each visit takes one random
    patch. ``skipped`` maps damaged files to the reason.

    Args:
        data: The dataset.
        patch: Side of a patch in LQ pixels.
        batch: Patches per step, over all processes.
        seed: From 0 to 2**64 - 1.
        workers: Threads of `prefetch`; 0 computes batches in the caller.
        use_hflip: As ``hflip`` of `Augmentation`.
        use_rot: As ``rot`` of `Augmentation`.
        color: As ``color`` of `Augmentation`.
        skip_broken: Replace a damaged image by the next one of the order instead of raising.
        shard: (rank, world size). This process draws its slice of each batch; the slices
            of all ranks make up the batch of a single process, in order.

    Raises:
        UsageError: For a value out of range.
        InputError: For images smaller than a patch.
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
        shard: tuple[int, int] = (0, 1),
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
        data.check_patch_size(patch)
        number, count = shard
        if batch % count or not 0 <= number < count:
            raise UsageError(f"a batch of {batch} has no share for rank {number} of {count}")
        self._positions = range(number * batch // count, (number + 1) * batch // count)
        self.data, self.patch, self.batch, self.workers = data, patch, batch, workers
        self.skipped: dict[Path, str] = {}
        self._seed, self._skip_broken = seed, skip_broken
        self._augmentation = Augmentation(use_hflip, use_rot, color)
        self._epoch_order = functools.lru_cache(_CACHED_EPOCHS)(self._shuffle)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return LQ and GT of a step, of which the same step gives the same bits.

        ``step`` counts from 0. LQ is (B, 3, patch, patch) and GT (B, 3, patch * scale,
        patch * scale), float32 in 0..1, where B is this process's share of the batch. Raises
        `InputError` naming a damaged file, or with ``skip_broken`` if no other is left.
        """
        pairs = [self._sample(step, place) for place in self._positions]
        low, high = (np.stack(side).transpose(0, 3, 1, 2) for side in zip(*pairs, strict=True))
        return _tensor(low), _tensor(high)

    def prefetch(self, first_step: int) -> Generator[tuple[Tensor, Tensor]]:
        """Yield the batches of ``first_step`` and all later steps, without end.

        They are those of `at`, in order. Each thread prefetches up to two batches. An error of a
        thread is raised when its batch is due. Closing the generator waits for the batches in
        flight.
        """
        steps = count(first_step)
        if self.workers == 0:
            yield from map(self.at, steps)  # never returns
        pool = ThreadPoolExecutor(self.workers, "lowtide-batches")
        pending: deque[Future[tuple[Tensor, Tensor]]] = deque()
        try:
            while True:
                while len(pending) < _PREFETCH_PER_WORKER * self.workers:
                    pending.append(pool.submit(self.at, next(steps)))
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return philox(self._seed, _SHUFFLE_KEY, epoch, 0).permutation(len(self.data))

    def _image_index(self, step: int, batch_position: int, offset: int) -> int:
        """Return the image index of a sample, or of the one ``offset`` on in the epoch."""
        epoch, position = divmod(step * self.batch + batch_position, len(self.data))
        return int(self._epoch_order(epoch)[(position + offset) % len(self.data)])

    def _sample(self, step: int, batch_position: int) -> tuple[np.ndarray, np.ndarray]:
        for offset in range(len(self.data)):
            index = self._image_index(step, batch_position, offset)
            # A fresh generator: what a damaged file drew must not change the next sample.
            generator = philox(self._seed, _SAMPLE_KEY, step, batch_position)
            try:
                return self.data.sample(index, self.patch, self._augmentation, generator)
            except InputError as error:
                if not self._skip_broken:
                    raise InputError(
                        error.message, hint="repair it, or set skip_broken: true"
                    ) from error
                self.skipped[self.data.path(index)] = error.message
        raise InputError(
            f"none of the {len(self.data):,} training images can be read: "
            f"{next(iter(self.skipped.values()))}"
        )


def _tensor(images: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(images))
