"""Scratch files: temporary disk space for spilled data during a run."""

from __future__ import annotations

import contextlib
import heapq
import tempfile
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

from lowtide.core.atomic_file import is_disk_full
from lowtide.core.errors import OutputError
from lowtide.core.units import format_bytes

_HINT = "free some space, name another folder for scratch files, or allow more memory"
BLOCK_BYTES = 1 << 20
# Bytes that a file without blocks in use keeps.
_MAX_KEPT_BYTES = 1 << 30


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

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at byte ``offset``."""
        try:
            self._file.seek(offset)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # of what is still buffered
                self._file.close()
            why = "the disk is full" if is_disk_full(error) else error.strerror or str(error)
            size = format_bytes(data.nbytes)
            raise OutputError(
                f"{why}: could not write {size} to the scratch file", hint=_HINT
            ) from error

    def read(self, offset: int, buffer: memoryview) -> None:
        """Read bytes from ``offset`` into ``buffer``; they must have been written."""
        self._file.seek(offset)
        size = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if size != buffer.nbytes:
            raise AssertionError(f"bytes {offset} to {offset + buffer.nbytes} were not all written")

    def truncate(self, size: int) -> None:
        """Truncate the file to ``size`` bytes."""
        self._file.truncate(size)

    @property
    def is_closed(self) -> bool:
        """Whether the file is unusable: it was closed, or the disk was full."""
        return self._file.closed

    def close(self) -> None:
        """Release the space now; may be called more than once."""
        self._file.close()


class ScratchBlockPool:
    """Pool of reusable blocks of `BLOCK_BYTES` bytes in one `ScratchFile`.

    Overwriting takes less time than a new file: the system has it in its page cache already. When
    no block is in use, at most 1 GiB is kept. Thread-safe.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = ScratchFile(folder)
        weakref.finalize(self, self._file.close)
        self._free_blocks: list[
            int
        ] = []  # heap: low blocks first, so that the end can be truncated
        self._count = 0
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether all data are lost: it was closed, or the disk was full."""
        return self._file.is_closed

    def allocate(self) -> int:
        """Allocate a block; returns its number."""
        with self._lock:
            if self._free_blocks:
                return heapq.heappop(self._free_blocks)
            self._count += 1
            return self._count - 1

    def free(self, blocks: Iterable[int]) -> None:
        """Free blocks for reuse."""
        with self._lock:
            for block in blocks:
                heapq.heappush(self._free_blocks, block)
            if (
                len(self._free_blocks) == self._count > _MAX_KEPT_BYTES // BLOCK_BYTES
                and not self.is_closed
            ):
                self._count = _MAX_KEPT_BYTES // BLOCK_BYTES
                self._free_blocks = list(range(self._count))
                self._file.truncate(_MAX_KEPT_BYTES)

    def close(self) -> None:
        """Release the file now."""
        self._file.close()

    def write(self, block: int, offset: int, data: memoryview) -> None:
        """Write ``data`` at byte ``offset`` of a block."""
        with self._lock:
            self._file.write(block * BLOCK_BYTES + offset, data)

    def read(self, block: int, offset: int, buffer: memoryview) -> None:
        """Read bytes from ``offset`` of a block into ``buffer``."""
        with self._lock:
            self._file.read(block * BLOCK_BYTES + offset, buffer)


class ScratchSpace:
    """`ScratchBlockPool` in ``folder``, created on first use and shared by several runs.

    They are created again after they were closed or the disk was full. A copy (or pickle) shares no
    blocks with the original.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._blocks: ScratchBlockPool | None = None

    def blocks(self) -> ScratchBlockPool:
        """Return the current blocks.

        Raises:
            OutputError: if they cannot be created.
        """
        if self._blocks is None or self._blocks.is_closed:
            self._blocks = ScratchBlockPool(self.folder)
        return self._blocks

    def close(self) -> None:
        """Release all space now; the next use creates new blocks."""
        if self._blocks is not None:
            self._blocks.close()

    def __reduce__(self) -> tuple[type[ScratchSpace], tuple[Path | None]]:
        return ScratchSpace, (self.folder,)
