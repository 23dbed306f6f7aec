"""Lack of memory: how it is detected, and how allocators give back what they keep."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator

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


# Resident memory may grow by 1/_GROWTH_DIVISOR of the expected bytes before the heap is trimmed
# again; _NEW_BLOCKS_SHARE of coming bytes does not fit the heap's free blocks.
_GROWTH_DIVISOR, _NEW_BLOCKS_SHARE = 8, 0.5


class HeapLimiter:
    """Trims the heap of a run before it exceeds ``expected_bytes`` by blocks that are free.

    Bands differ in size, and over hundreds of them the heap would keep several times the bytes that
    are alive.

    Args:
        current_bytes: Returns the resident bytes of the run.
        expected_bytes: What it is expected to take.
        device: Its device, such as ``"cpu"``.
    """

    def __init__(
        self, current_bytes: Callable[[], int], expected_bytes: int, device: str = "cpu"
    ) -> None:
        self._current_bytes, self._device = current_bytes, device
        self._expected = self._limit = expected_bytes

    def make_room(self, new_bytes: int) -> int:
        """Return the resident bytes plus ``new_bytes``, after trimming the heap if needed.

        The heap is trimmed only above the expected bytes.
        """
        new = int(new_bytes * _NEW_BLOCKS_SHARE)
        held = self._current_bytes() + new
        if held > self._limit:
            trim_allocators(self._device)
            held = self._current_bytes() + new
            # If that many bytes are live, trimming each time would only take time.
            self._limit = max(self._expected, held + self._expected // _GROWTH_DIVISOR)
        return held
