"""Offering a card's allocator one piece of memory that a run can be cut out of."""

from __future__ import annotations

import os

import torch

# PyTorch's variables for its allocator's settings, of which these leave large blocks as they are.
_SETTINGS, _UNCUT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), ("max_split_size", "backend")
# The part of a piece that, where it is kept anyway, does as well: what an earlier run left lies
# together but for what was made once and stays.
_AS_GOOD = 0.8


def is_cut() -> bool:
    """Whether an allocator with this process's settings makes blocks of others out of a piece."""
    given = " ".join(os.environ.get(name, "") for name in _SETTINGS)
    return not any(setting in given for setting in _UNCUT)


def offer_piece(nbytes: int, device: torch.device) -> None:
    """Take so many bytes on ``device`` and give them back, unless its allocator keeps them already.

    Only for fewer gaps: where they cannot be had in one piece, the run may still go on.
    """
    if not nbytes or _kept(device) >= _AS_GOOD * nbytes:
        return
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return


def _kept(device: torch.device) -> int:
    """What the allocator has and nobody uses; that of a CPU gives all back."""
    if device.type == "cpu":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
