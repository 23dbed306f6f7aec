"""Recognizing that memory ran out, and letting go of what a failure or an allocator holds."""

from __future__ import annotations

import re
import traceback

from lowtide.core.heap import trim_heap

# oneDNN without memory for its generated code; with "descriptor" it would be something it lacks.
_NO_PRIMITIVE = re.compile(r"could not create a primitive(?! descriptor)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out, on CUDA or on the CPU.

    Only PyTorch's own classes and messages count: a driver fault or a kernel bug is not
    "out of memory" and must surface.
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator: can't allocate memory" in text
        or "DefaultCPUAllocator: not enough memory" in text  # the wording on Windows
        or "could not create a memory object" in text  # oneDNN's own scratch
        or _NO_PRIMITIVE.search(text) is not None
    )


def free_exception(error: BaseException, device: str) -> None:
    """Drop everything that a caught ``error`` keeps alive, then empty the allocator's cache.

    To be called after the ``except`` block has ended: inside it the frames are still held. The
    frames of the whole exception chain are cleared, because a chained cause holds its own.
    """
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        # Both: a cause from elsewhere does not undo what was being handled.
        links += [link.__cause__, link.__context__]
    # What the heap keeps may be just what other allocators (oneDNN's, numpy's) were missing.
    trim_allocators(device, collect=True)


def trim_allocators(device: str, *, collect: bool = False) -> None:
    """Return what allocators keep of freed memory: the C heap, and that of a card which ``device``
    is; with ``collect``, Python's garbage first."""
    trim_heap(collect=collect)
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()
