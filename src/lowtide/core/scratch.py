"""Bytes on disk for the length of a run."""

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
# Bytes of blocks that stay in a file of which none is taken.
_KEPT = 1 << 30


class ScratchFile:
    """A file without a name in ``folder``, by default the system's temporary one.

    It is gone when the process is, however that ends. Raises `OutputError` when there can be none,
    or nothing more can be written, as on a full disk; what was written is given back then.
    """

    def __init__(self, folder: Path | None = None) -> None:
        try:
            # Open as long as this lives.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="lowtide-scratch-", dir=folder
            )
        except OSError as error:
            raise OutputError(
                f"nothing can be kept in {folder or 'the scratch folder'}: {error}",
                hint="name another folder for scratch files",
            ) from error

    def put(self, at: int, data: memoryview) -> None:
        """Write bytes from ``at`` on."""
        try:
            self._file.seek(at)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # of what is still to be written
                self._file.close()
            why = "the disk is full" if is_lack_of_space(error) else error.strerror or str(error)
            size = format_bytes(data.nbytes)
            raise OutputError(
                f"{why}: {size} of scratch could not be written", hint=_HINT
            ) from error

    def get(self, at: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``at`` on, which must have been written."""
        self._file.seek(at)
        size = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if size != buffer.nbytes:
            raise AssertionError(f"bytes {at} to {at + buffer.nbytes} were not all written")

    def shorten(self, size: int) -> None:
        """Give back what lies behind so many bytes."""
        self._file.truncate(size)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be kept in it any more: it was closed, or the disk was full."""
        return self._file.closed

    def close(self) -> None:
        """Give the space back now; may be called more than once."""
        self._file.close()


class ScratchBlocks:
    """Blocks of `BLOCK` bytes in one `ScratchFile`; those given back are taken again.

    What is written over takes less time than a new file: the system has room for it in its memory
    already. When none is taken, at most 1 GiB stays. May be used by several threads at once.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = ScratchFile(folder)
        weakref.finalize(self, self._file.close)
        self._free: list[int] = []  # a heap: the first ones are taken, so that the last can go
        self._count = 0
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether everything is lost: it was closed, or the disk was full."""
        return self._file.is_closed

    def take(self) -> int:
        """The number of a block, whose bytes are not those of any other."""
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)
            self._count += 1
            return self._count - 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks for others to take."""
        with self._lock:
            for block in blocks:
                heapq.heappush(self._free, block)
            if len(self._free) == self._count > _KEPT // BLOCK and not self.is_closed:
                self._count = _KEPT // BLOCK
                self._free = list(range(self._count))
                self._file.shorten(_KEPT)

    def close(self) -> None:
        """Give the file back now."""
        self._file.close()

    def put(self, block: int, at: int, data: memoryview) -> None:
        """Write bytes from ``at`` on within a block."""
        with self._lock:
            self._file.put(block * BLOCK + at, data)

    def get(self, block: int, at: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with what was written from ``at`` on within a block."""
        with self._lock:
            self._file.get(block * BLOCK + at, buffer)


class ScratchSpace:
    """`ScratchBlocks` in ``folder`` for run after run: made when some are first asked for, and anew
    after they were closed or the disk was full. A copy has none of the original's."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._blocks: ScratchBlocks | None = None

    def blocks(self) -> ScratchBlocks:
        """Those of this run. Raises `OutputError` where there can be none."""
        if self._blocks is None or self._blocks.is_closed:
            self._blocks = ScratchBlocks(self.folder)
        return self._blocks

    def close(self) -> None:
        """Give everything back now, and begin anew with whoever asks next."""
        if self._blocks is not None:
            self._blocks.close()

    def __reduce__(self) -> tuple[type[ScratchSpace], tuple[Path | None]]:
        return ScratchSpace, (self.folder,)
