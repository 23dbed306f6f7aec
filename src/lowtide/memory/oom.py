"""What follows after memory ran out: which failures mean that, what is freed, what is tried next.

Whoever has something smaller to try writes it after an `OutOfMemoryCatcher`: a tile its repeat, a
smaller batch and its parts (`streaming.tiles.recovery`), an item of a job a smaller plan
(`jobs.engine.item`), a step of a training what takes less (`training.train_step`). Whoever has
nothing smaller says what was done, by `naming_out_of_memory`.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Self

from lowtide.core.errors import OutOfMemoryError
from lowtide.core.heap import trim_heap
from lowtide.core.torch_state import loaded_torch

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
    if isinstance(error, OutOfMemoryError | MemoryError):
        return True
    if (torch := loaded_torch()) is None:
        return False
    if isinstance(error, torch.OutOfMemoryError):
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


class OutOfMemoryCatcher:
    """Context that ends early where memory runs out in it, with all freed that was held for it.

    What stands after it is the next attempt. ``failure`` is what was raised, None until then. All
    that is no lack of memory passes.

    Args:
        device: The device whose allocators are emptied, or ``"cpu"``.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.failure = error
        free_exception(error, self._device)
        return True


@contextlib.contextmanager
def naming_out_of_memory(
    what: str | Callable[[], str],
    hint: str = "close other programs, or raise the limit of this process (ulimit -d, ulimit -v)",
    *,
    is_lack: Callable[[BaseException], bool] = is_out_of_memory,
) -> Iterator[None]:
    """Raise `OutOfMemoryError` where memory runs out inside: "memory ran out" and ``what``.

    One that is raised inside passes as it is. ``is_lack`` decides what else is a lack of memory.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except Exception as error:
        if not is_lack(error):
            raise
        done = what if isinstance(what, str) else what()
        raise OutOfMemoryError(f"memory ran out {done}", hint=hint) from error


def free_exception(error: BaseException, device: str) -> None:
    """Free all that a caught ``error`` keeps alive, then empty allocator caches.

    The frames of the whole exception chain are cleared, because a chained cause holds its own; that
    which caught it keeps its variables.
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
