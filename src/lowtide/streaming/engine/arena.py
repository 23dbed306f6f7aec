"""Offering a card's allocator one piece of memory that a run can be cut out of."""

from __future__ import annotations

import os

import torch
from torch import Tensor

# PyTorch's variables for its allocator's settings, of which these leave large blocks as they are.
_SETTINGS, _UNCUT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), ("max_split_size", "backend")
# The part of a piece that, where it is kept anyway, does as well: what an earlier run left lies
# together but for what was made once and stays.
_AS_GOOD = 0.8


def splits_large_blocks() -> bool:
    """Whether an allocator with this process's settings makes blocks of others out of a piece."""
    given = " ".join(os.environ.get(name, "") for name in _SETTINGS)
    return not any(setting in given for setting in _UNCUT)


def reserve_arena(nbytes: int, device: torch.device, *, products: bool = False) -> None:
    """Take so many bytes on ``device`` and give them back, unless its allocator keeps them already;
    where a run has ``products`` of matrices, after their workspace, which stays: cut out of the
    piece, it would part it.

    Only for fewer gaps: where they cannot be had in one piece, the run may still go on.
    """
    if not nbytes or _kept(device) >= _AS_GOOD * nbytes:
        return
    try:
        if products:
            one = torch.zeros(1, 1, device=device)
            torch.mm(one, one)
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return


def hold_arena(nbytes: int, device: torch.device, beside: int) -> Tensor | None:
    """The piece of an earlier run that the allocator of a card keeps, so that what is taken next,
    of ``beside`` bytes, is not cut out of it; None if there is none, or enough beside it."""
    if not nbytes or not nbytes <= _kept(device) < nbytes + beside:
        return None
    if not any(size >= nbytes for size in _free_blocks(device)):
        return None  # a new one would be one more
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _free_blocks(device: torch.device) -> list[int]:
    """Bytes of each block that is kept for nobody in particular; looking takes milliseconds."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["segment_pool_id"] == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


def _kept(device: torch.device) -> int:
    """What the allocator has and nobody uses; that of a CPU gives all back."""
    if device.type == "cpu":
        return 0
    # Asked for one by one, each number takes as long as a card does for a light operator.
    found = torch.cuda.memory_stats_as_nested_dict(device)
    taken, used = (found[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
    return taken - used
