"""Several processes that train one network, each with its own device and share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class ProcessGroup:
    """``count`` processes, of which this is number ``rank``, and ``local`` on its host.

    Gradients are added up once a step, after all parts of a batch, not in each backward pass: so
    it costs the same whatever the batch is cut into, and networks may be run as often as a step
    wants. Every process must make the same calls in the same order.
    """

    count: int = 1
    rank: int = 0
    local: int = 0

    @classmethod
    def here(cls) -> ProcessGroup:
        """As ``torchrun`` or ``accelerate launch`` started this one; else it is alone."""
        names = ("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)
        return cls(*(int(os.environ.get(name, usual)) for name, usual in names))

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.count == 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and tells."""
        return self.rank == 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Make each tensor, in its place, the sum of all processes' ones."""
        if not self.alone:
            for work in [dist.all_reduce(one, async_op=True) for one in tensors]:
                assert work is not None
                work.wait()

    def mean(self, numbers: dict[str, float], device: torch.device) -> dict[str, float]:
        """Means over the processes, which have the same names; not finite if one is not."""
        if self.alone or not numbers:
            return numbers
        told = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
        self.add_up([told])
        return dict(zip(numbers, (told / self.count).tolist(), strict=True))

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether one of them says so."""
        return self.mean({"flag": float(flag)}, device)["flag"] > 0


ALONE = ProcessGroup()
