"""Data-parallel training: each process has a device and a share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class ProcessGroup:
    """Rank and world size of this process, with the reductions that a training needs.

    ``world_size`` is the world size, ``rank`` the global rank and ``local_rank`` the rank on this
    host.

    Gradients are all-reduced once per step, after all micro-batches, not in each backward pass as
    in DistributedDataParallel: the cost does not depend on the number of micro-batches, and a step
    may run a network any number of times. Every process must make the same calls in the same
    order.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> ProcessGroup:
        """Read the group from the variables of ``torchrun`` or ``accelerate launch``.

        Without them it is a single process.
        """
        names = ("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)
        return cls(*(int(os.environ.get(name, usual)) for name, usual in names))

    @property
    def is_single(self) -> bool:
        """Whether this is the only process."""
        return self.world_size == 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one process that writes, logs and validates."""
        return self.rank == 0

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """All-reduce tensors of any shape in place to their sums over the processes."""
        if not self.is_single:
            for work in [dist.all_reduce(one, async_op=True) for one in tensors]:
                assert work is not None
                work.wait()

    def mean(self, values: dict[str, float], device: torch.device) -> dict[str, float]:
        """Return the mean of each value over the processes.

        All processes must have the same names. A mean is not finite if one value is not.
        """
        if self.is_single or not values:
            return values
        stacked = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
        self.all_reduce([stacked])
        return dict(zip(values, (stacked / self.world_size).tolist(), strict=True))

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return whether ``flag`` is set in at least one process."""
        return self.mean({"flag": float(flag)}, device)["flag"] > 0


SINGLE_PROCESS = ProcessGroup()
