"""Memory of libvips's threads, which must be there before the network takes all there is.

libvips ends the process when it cannot make the threads of an encoder. So they are made when a
file is opened, and only where there is room for their stacks.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable

from lowtide.core.errors import OutOfMemoryError
from lowtide.core.units import MIB, format_bytes

# A thread that runs the pipeline, one that computes rows, and two that write them.
_THREADS = 4
# Rows on their way, and the smallest tiles: with less left libvips fails in the midst of a file.
_ROWS_AND_TILES = 32 * MIB
_DEFAULT_STACK = 8 * MIB


def require_room_for_encoder(name: str) -> None:
    """Raise `OutOfMemoryError` if the system refuses the memory that an encoder begins with."""
    size = _THREADS * _stack_bytes() + _ROWS_AND_TILES
    try:
        # Private, as stacks are: what is shared does not count.
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError) as error:
        raise OutOfMemoryError(
            f"{name}: there is no memory for its encoder, whose threads and rows take up to"
            f" {format_bytes(size)} of addresses ({error})",
            hint="raise the limit of this process (ulimit -d, ulimit -v), or pass a smaller"
            " --budget so that the network leaves more",
        ) from error


def wait_until_read(descriptor: int, stopped: Callable[[], bool]) -> None:
    """Wait until a pipe is empty, or ``stopped`` returns True."""
    while _unread_bytes(descriptor) and not stopped():
        time.sleep(0.001)


def _unread_bytes(descriptor: int) -> int:
    """Return the bytes that wait in a pipe; 0 where the system does not tell."""
    try:
        import fcntl
        import termios
    except ImportError:  # Windows
        return 0
    found = bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return struct.unpack("i", found)[0]


def _stack_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return _DEFAULT_STACK
    soft, _hard = resource.getrlimit(resource.RLIMIT_STACK)
    return _DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft
