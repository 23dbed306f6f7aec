"""Batches determined by seed and step, for exact resumption."""

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
from lowtide.core.philox import philox_generator

# Batches prefetched per thread.
_PREFETCH_PER_WORKER = 2
# Cached shuffles of epochs: threads work in two epochs at most at the same time.
_CACHED_EPOCHS = 4
# Second half of the Philox key: the purpose of the random numbers.
_SHUFFLE_KEY, _SAMPLE_KEY = 0, 1


class SampleDataset(Protocol):
    """Interface of datasets, such as `PatchSamples`: each sample is one or several arrays."""

    def __len__(self) -> int:
        """Return the number of items that samples are drawn from."""
        ...

    def path(self, index: int) -> Path:
        """Return the file of an item, for messages."""
        ...

    def sample(self, index: int, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Return a random sample of an item, such as LQ and GT, (C, H, W) each.

        Raises `InputError` for a damaged file.
        """
        ...

    def example(self, batch: int) -> tuple[Tensor, ...]:
        """Return ``batch`` stacked samples, (B, ...) each, as meta tensors."""
        ...


class BatchLoader:
    """Deterministic source of training batches by step, with threaded prefetch.

    All items are visited in an order shuffled anew in each epoch; each visit takes one random
    sample. ``skipped`` maps damaged files to the reason.

    Args:
        samples: The dataset.
        batch: Samples per step, over all processes.
        seed: From 0 to 2**64 - 1.
        workers: Threads of `prefetch`; 0 computes batches in the caller.
        skip_broken: Replace a damaged item by the next one of the order instead of raising.
        shard: (rank, world size). This process draws its slice of each batch; the slices of all
            ranks make up the batch of a single process, in order.

    Raises:
        UsageError: For a value out of range.
    """

    def __init__(
        self,
        samples: SampleDataset,
        *,
        batch: int,
        seed: int,
        workers: int = 0,
        skip_broken: bool = False,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        for name, value, lowest in (("batch", batch, 1), ("workers", workers, 0)):
            if value < lowest:
                raise UsageError(f"{name} must be {lowest} or more: {value}")
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"seed must be from 0 to 2**64 - 1: {seed}")
        number, count = shard
        if batch % count or not 0 <= number < count:
            raise UsageError(f"a batch of {batch} has no share for rank {number} of {count}")
        self._positions = range(number * batch // count, (number + 1) * batch // count)
        self.samples, self.batch, self.workers = samples, batch, workers
        self.skipped: dict[Path, str] = {}
        self._seed, self._skip_broken = seed, skip_broken
        self._epoch_order = functools.lru_cache(_CACHED_EPOCHS)(self._shuffle)

    def at(self, step: int) -> tuple[Tensor, ...]:
        """Return the batch of a step: (B, ...) for each array of a sample.

        The same step gives the same bits. ``step`` counts from 0; B are the samples of this
        process. Raises `InputError` naming a damaged file, or with ``skip_broken`` if no other is
        left.
        """
        samples = [self._sample(step, place) for place in self._positions]
        return tuple(
            torch.from_numpy(np.ascontiguousarray(np.stack(arrays)))
            for arrays in zip(*samples, strict=True)
        )

    def example(self, batch: int) -> tuple[Tensor, ...]:
        """Return a batch of ``batch`` samples, (B, ...) each, as meta tensors."""
        return self.samples.example(batch)

    def prefetch(self, first_step: int) -> Generator[tuple[Tensor, ...]]:
        """Yield the batches of ``first_step`` and all later steps, (B, ...) each.

        They are those of `at`, in order. Each thread prefetches up to two batches. An error of a
        thread is raised when its batch is due. Closing the generator waits for the batches in
        flight.
        """
        steps = count(first_step)
        if self.workers == 0:
            yield from map(self.at, steps)  # never returns
        pool = ThreadPoolExecutor(self.workers, "lowtide-batches")
        pending: deque[Future[tuple[Tensor, ...]]] = deque()
        try:
            while True:
                while len(pending) < _PREFETCH_PER_WORKER * self.workers:
                    pending.append(pool.submit(self.at, next(steps)))
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return philox_generator(self._seed, _SHUFFLE_KEY, epoch, 0).permutation(len(self.samples))

    def _index(self, step: int, batch_position: int, offset: int) -> int:
        """Return the index of a sample's item, or of the one ``offset`` on in the epoch."""
        epoch, position = divmod(step * self.batch + batch_position, len(self.samples))
        return int(self._epoch_order(epoch)[(position + offset) % len(self.samples)])

    def _sample(self, step: int, batch_position: int) -> tuple[np.ndarray, ...]:
        for offset in range(len(self.samples)):
            index = self._index(step, batch_position, offset)
            # A fresh generator: what a damaged file drew must not change the next sample.
            generator = philox_generator(self._seed, _SAMPLE_KEY, step, batch_position)
            try:
                return self.samples.sample(index, generator)
            except InputError as error:
                if not self._skip_broken:
                    raise InputError(
                        error.message, hint="repair it, or set skip_broken: true"
                    ) from error
                self.skipped[self.samples.path(index)] = error.message
        raise InputError(
            f"none of the {len(self.samples):,} training files can be read: "
            f"{next(iter(self.skipped.values()))}"
        )
