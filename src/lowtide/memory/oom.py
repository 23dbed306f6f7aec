"""Detection of out-of-memory errors, and release of a failed run's memory."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from lowtide.core.errors import OutOfMemoryError
from lowtide.core.heap import trim_heap

# oneDNN without memory for its generated code; with "descriptor", an unsupported operation.
_NO_PRIMITIVE = re.compile(r"could not create a primitive(?! descriptor)")


# What libraries, the loader of shared ones and Python say, or the name of what they raise.
NO_MEMORY_WORDS = (
    "MemoryError",
    "bad_alloc",
    "map segment",
    "allocate memory",
    "start new thread",
    "could not create a memory object",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means out of memory, on CUDA or on the CPU.

    Only Lowtide's and PyTorch's own classes and messages count: a driver fault or a kernel bug is
    not "out of memory" and must surface.
    """
    import torch

    if isinstance(error, OutOfMemoryError | torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator: can't allocate memory" in text
        or "DefaultCPUAllocator: not enough memory" in text  # the wording on Windows
        or "could not create a memory object" in text  # oneDNN's own workspace
        or _NO_PRIMITIVE.search(text) is not None
    )


def lacks_memory(error: BaseException) -> bool:
    """Return whether ``error``, or what it came from, is for lack of memory in whatever library.

    Imports wrap what failed, and threads that cannot start raise `RuntimeError`. For what ends a
    command; what is tried again smaller is what `is_out_of_memory` knows.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, MemoryError) or any(words in str(link) for words in NO_MEMORY_WORDS):
            return True
        link = link.__cause__ or link.__context__
    return False


@contextlib.contextmanager
def naming_lack_of_memory(what: str) -> Iterator[None]:
    """Raise `OutOfMemoryError` that says ``what`` was done where memory ran out inside."""
    try:
        yield
    except Exception as error:
        if not lacks_memory(error):
            raise
        raise OutOfMemoryError(
            f"memory ran out while {what}",
            hint="close other programs, or raise the limit of this process (ulimit -d, ulimit -v)",
        ) from error


def free_exception(error: BaseException, device: str) -> None:
    """Free all that a caught ``error`` keeps alive, then empty allocator caches.

    Call it after the ``except`` block has ended: inside it the frames are still referenced. The
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
        # Both: an explicit cause does not clear the context.
        links += [link.__cause__, link.__context__]
    # Other allocators (oneDNN's, numpy's) may have failed for lack of just what the heap keeps.
    trim_allocators(device, collect=True)


def trim_allocators(device: str, *, collect: bool = False) -> None:
    """Release cached free memory of the C heap, and of ``device`` if it is CUDA.

    With ``collect``, Python's garbage is collected first.
    """
    trim_heap(collect=collect)
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()
