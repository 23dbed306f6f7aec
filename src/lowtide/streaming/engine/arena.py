"""Memory arena: one block that the CUDA caching allocator splits during a run.

A run that takes its memory from one large block leaves fewer gaps (less fragmentation).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

# PyTorch's variables for allocator settings, and the settings that keep large blocks unsplit.
_ALLOC_CONF_VARIABLES, _UNSPLIT_SETTINGS = (
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    ("max_split_size", "backend"),
)
# Share of an arena that is enough if the allocator has cached it already: memory of an earlier
# run is contiguous except for tensors that were made once and stay.
_MIN_CACHED_SHARE = 0.8


def splits_large_blocks() -> bool:
    """Whether the CUDA allocator splits large blocks under this process's settings.

    False if PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF sets ``max_split_size`` or ``backend``.
    """
    alloc_conf = " ".join(os.environ.get(name, "") for name in _ALLOC_CONF_VARIABLES)
    return not any(setting in alloc_conf for setting in _UNSPLIT_SETTINGS)


def reserve_arena(nbytes: int, device: torch.device, *, has_matmul: bool = False) -> None:
    """Allocate ``nbytes`` in one block and release it to the allocator's cache.

    Does nothing if the allocator has cached nearly as much already, or if the device has no such
    block: an arena only reduces fragmentation, and the run may still succeed without it.

    Args:
        nbytes: Size of the block in bytes.
        device: Device of the run.
        has_matmul: Whether the run has matrix products. Their workspace stays allocated, so it is
            allocated first; otherwise it would split the block.
    """
    if not nbytes or _cached_bytes(device) >= _MIN_CACHED_SHARE * nbytes:
        return
    try:
        if has_matmul:
            one = torch.zeros(1, 1, device=device)
            torch.mm(one, one)
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return


def hold_arena(nbytes: int, device: torch.device, next_bytes: int) -> Tensor | None:
    """Return a tensor, uint8 (``nbytes``,), over the cached arena of an earlier run.

    It keeps the arena whole: the next allocation, of ``next_bytes`` bytes, does not split it.
    Returns None if no cached block has ``nbytes``, or if the cache has room for both.
    """
    if not nbytes or not nbytes <= _cached_bytes(device) < nbytes + next_bytes:
        return None
    if not any(size >= nbytes for size in _free_blocks(device)):
        return None  # `torch.empty` would allocate a further block
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _free_blocks(device: torch.device) -> list[int]:
    """Return the bytes of each cached free block of the default pool.

    The memory snapshot takes milliseconds.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["segment_pool_id"] == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


def _cached_bytes(device: torch.device) -> int:
    """Return the bytes that the allocator has cached and no tensor uses; 0 on the CPU."""
    if device.type == "cpu":
        return 0
    # one nested query: each single statistic takes as long as a light operator on a GPU
    found = torch.cuda.memory_stats_as_nested_dict(device)
    taken, used = (found[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
    return taken - used
