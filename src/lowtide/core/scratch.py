"""Scratch files: temporary disk space for spilled data during a run."""

from __future__ import annotations

import contextlib
import heapq
import tempfile
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

from lowtide.core.atomic_file import is_lack_of_space
from lowtide.core.errors import OutputError
from lowtide.core.units import format_bytes

_HINT = "free some space, name another folder for scratch files, or allow more memory"
BLOCK = 1 << 20
# Bytes that a file without blocks in use keeps.
_KEPT = 1 << 30


class ScratchFile:
    """Anonymous temporary file for scratch data.

    It is in ``folder``, by default the system's temporary folder, and is removed when the process
    ends, however that happens.

    Raises:
        OutputError: if it cannot be created, or written to, as on a full disk; its space is then
            released.
    """

    def __init__(self, folder: Path | None = None) -> None:
        try:
            # Open as long as this object.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="lowtide-scratch-", dir=folder
            )
        except OSError as error:
            raise OutputError(
                f"could not create a scratch file in {folder or 'the scratch folder'}: {error}",
                hint="name another folder for scratch files",
            ) from error

    def put(self, at: int, data: memoryview) -> None:
        """Write ``data`` at byte ``at``."""
        try:
            self._file.seek(at)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # of what is still buffered
                self._file.close()
            why = "the disk is full" if is_lack_of_space(error) else error.strerror or str(error)
            size = format_bytes(data.nbytes)
            raise OutputError(
                f"{why}: could not write {size} to the scratch file", hint=_HINT
            ) from error

    def get(self, at: int, buffer: memoryview) -> None:
        """Read bytes from ``at`` into ``buffer``; they must have been written."""
        self._file.seek(at)
        size = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if size != buffer.nbytes:
            raise AssertionError(f"bytes {at} to {at + buffer.nbytes} were not all written")

    def shorten(self, size: int) -> None:
        """Truncate the file to ``size`` bytes."""
        self._file.truncate(size)

    @property
    def is_closed(self) -> bool:
        """Whether the file is unusable: it was closed, or the disk was full."""
        return self._file.closed

    def close(self) -> None:
        """Release the space now; may be called more than once."""
        self._file.close()


class ScratchBlocks:
    """Pool of blocks of `BLOCK` bytes in one `ScratchFile`; freed blocks are reused.

    Overwriting takes less time than a new file: the system has it in its page cache already. When
    no block is in use, at most 1 GiB is kept. Thread-safe.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = ScratchFile(folder)
        weakref.finalize(self, self._file.close)
        self._free: list[int] = []  # heap: low blocks first, so that the end can be truncated
        self._count = 0
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether all data are lost: it was closed, or the disk was full."""
        return self._file.is_closed

    def take(self) -> int:
        """Allocate a block; returns its number."""
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)
            self._count += 1
            return self._count - 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free blocks for reuse."""
        with self._lock:
            for block in blocks:
                heapq.heappush(self._free, block)
            if len(self._free) == self._count > _KEPT // BLOCK and not self.is_closed:
                self._count = _KEPT // BLOCK
                self._free = list(range(self._count))
                self._file.shorten(_KEPT)

    def close(self) -> None:
        """Release the file now."""
        self._file.close()

    def put(self, block: int, at: int, data: memoryview) -> None:
        """Write ``data`` at byte ``at`` of a block."""
        with self._lock:
            self._file.put(block * BLOCK + at, data)

    def get(self, block: int, at: int, buffer: memoryview) -> None:
        """Read bytes from ``at`` of a block into ``buffer``."""
        with self._lock:
            self._file.get(block * BLOCK + at, buffer)


class ScratchSpace:
    """`ScratchBlocks` in ``folder``, created on first use and shared by several runs.

    They are created again after they were closed or the disk was full. A copy (or pickle) shares no
    blocks with the original.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._blocks: ScratchBlocks | None = None

    def blocks(self) -> ScratchBlocks:
        """Return the current blocks.

        Raises:
            OutputError: if they cannot be created.
        """
        if self._blocks is None or self._blocks.is_closed:
            self._blocks = ScratchBlocks(self.folder)
        return self._blocks

    def close(self) -> None:
        """Release all space now; the next use creates new blocks."""
        if self._blocks is not None:
            self._blocks.close()

    def __reduce__(self) -> tuple[type[ScratchSpace], tuple[Path | None]]:
        return ScratchSpace, (self.folder,)
