"""Pages that are spilled between segments: to disk, or from a GPU to pinned host memory.

Maps that the device cannot hold cost a copy instead of a refusal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.core.scratch import BLOCK_BYTES, ScratchSpace
from lowtide.streaming.pages.page import FeaturePage, RowMajorLayout
from lowtide.streaming.pages.transfer import HostTransfer, PendingCopy
from lowtide.streaming.spans import Spans, count_rows, intersect_spans


class DiskPage(FeaturePage):
    """A feature map in blocks of an unnamed file, stored row by row.

    Row-major storage keeps the bytes of any row contiguous. The file is gone when the process ends,
    in whatever way. Raises `OutputError` when the disk is full; the blocks written so far are freed
    then.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        dim: int,
        device: torch.device,
        space: ScratchSpace,
    ) -> None:
        self.device, self._layout = device, RowMajorLayout(shape, dtype, dim)
        self._block_numbers: dict[int, int] = {}  # block index in the map to block of the file
        self._open(space)

    def _open(self, space: ScratchSpace) -> None:
        self._blocks = space.blocks()

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows, such as (B, C, rows, W), to the file, from row ``first`` on."""
        self._write_bytes(
            self._layout.byte_range((first, first))[0], self._layout.to_bytes(rows).cpu()
        )

    def _write_bytes(self, at: int, raw: Tensor) -> None:
        data = raw.numpy().data
        for place, start, part in _block_ranges(at, len(data)):
            if place not in self._block_numbers:
                self._block_numbers[place] = self._blocks.allocate()
            self._blocks.write(self._block_numbers[place], start, data[part])

    def read(self, spans: Spans) -> Tensor:
        """Read rows, such as (B, C, rows, W), into new memory."""
        buffer, at = torch.empty(self._layout.bytes_of(spans), dtype=torch.uint8), 0
        for span in spans:
            first, last = self._layout.byte_range(span)
            self._read_bytes(first, buffer[at : at + last - first])
            at += last - first
        return self._layout.from_bytes(buffer.to(self.device))

    def _read_bytes(self, at: int, buffer: Tensor) -> None:
        data = buffer.numpy().data
        for place, start, part in _block_ranges(at, len(data)):
            self._blocks.read(self._block_numbers[place], start, data[part])

    def close(self) -> None:
        """Free the blocks; may be called more than once."""
        self._blocks.free(self._block_numbers.values())
        self._block_numbers = {}


def _block_ranges(at: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield (block, first byte in it, slice of the data) for bytes from ``at`` on."""
    done = 0
    while done < size:
        place, start = divmod(at + done, BLOCK_BYTES)
        end = min(size, done + BLOCK_BYTES - start)
        yield place, start, slice(done, end)
        done = end


# Bands whose rows are on the device: the current one and the next.
_PREFETCH_DEPTH = 2


@dataclass(frozen=True)
class _Prefetched:
    """The rows that one band reads, their device memory, and the pending copy."""

    spans: Spans
    memory: Tensor
    pending: PendingCopy


class HostPage(FeaturePage):
    """A feature map in host memory, copied asynchronously to and from the GPU.

    Rows are copied out while the GPU computes. Those that the next band reads are prefetched during
    the current one, into the device memory of the band before it.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, dim: int, transfer: HostTransfer
    ) -> None:
        self.device, self._transfer = transfer.device, transfer
        self._layout = RowMajorLayout(shape, dtype, dim)
        self._host_buffer = transfer.allocate(self._layout.nbytes)
        self._pending_store: PendingCopy | None = None
        self._requested: list[Spans] = []
        self._prefetched = deque[_Prefetched]()
        self._reusable: _Prefetched | None = None

    def write(self, first: int, rows: Tensor) -> None:
        """Start the copy of rows, such as (B, C, rows, W), to the host.

        It begins once the previous rows are there.
        """
        run = self._layout.to_bytes(rows)
        if self._pending_store is not None:
            self._pending_store.wait()
        self._pending_store = self._transfer.store(
            run, self._host_buffer, self._layout.byte_range((first, first))[0]
        )

    def prefetch(self, spans: Spans) -> None:
        """Start the prefetch of the rows that a band reads.

        The first band's rows are fetched together with those of the second, so that both get
        buffers of equal size, which all later bands reuse.
        """
        if not spans:
            self._drop_prefetched()
            return
        if len(self._prefetched) == _PREFETCH_DEPTH:
            self._reusable = self._prefetched.popleft()
            self._reusable.pending.end_reads()
        self._requested.append(spans)
        if len(self._prefetched) + len(self._requested) == _PREFETCH_DEPTH:
            self._start_fetches()

    def read(self, spans: Spans) -> Tensor:
        """Return rows, such as (B, C, rows, W), prefetched or fetched now."""
        self._start_fetches()
        for ahead in self._prefetched:
            if count_rows(intersect_spans(ahead.spans, spans)) == count_rows(spans):
                return _clone_if_aliased(
                    self._layout.from_bytes(self._select_rows(ahead, spans)), ahead.memory
                )
        return self._layout.from_bytes(self._fetch(spans, None, 0).pending.result())

    def _start_fetches(self) -> None:
        """Fetch the expected rows."""
        most = max(map(self._layout.bytes_of, self._requested), default=0)
        for spans in self._requested:
            self._prefetched.append(self._fetch(spans, self._reusable, most))
            self._reusable = None
        self._requested = []

    def _fetch(self, spans: Spans, reusable: _Prefetched | None, min_bytes: int) -> _Prefetched:
        """Fetch rows into the memory of ``reusable`` if large enough, else into new memory.

        New memory has at least ``min_bytes`` bytes.
        """
        size = self._layout.bytes_of(spans)
        if reusable is None or len(reusable.memory) < size:
            reusable = None
            memory = torch.empty(max(size, min_bytes), dtype=torch.uint8, device=self.device)
        else:
            memory = reusable.memory
        places = [self._layout.byte_range(span) for span in spans]
        after = None if reusable is None else reusable.pending
        return _Prefetched(
            spans, memory, self._transfer.fetch(self._host_buffer, places, memory[:size], after)
        )

    def _select_rows(self, prefetched: _Prefetched, spans: Spans) -> Tensor:
        """Return the bytes of ``spans`` out of those that were prefetched."""
        run, parts, at = prefetched.pending.result(), [], 0
        for span in prefetched.spans:
            start = self._layout.byte_range(span)[0] - at
            for part in intersect_spans([span], spans):
                first, last = self._layout.byte_range(part)
                parts.append(run[first - start : last - start])
            at += self._layout.bytes_of([span])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _drop_prefetched(self) -> None:
        """Free the prefetch buffers on the device."""
        for ahead in self._prefetched:
            ahead.pending.end_reads()
        self._prefetched.clear()
        self._requested, self._reusable = [], None

    def close(self) -> None:
        """Release the host memory to other pages."""
        self._drop_prefetched()
        if self._pending_store is not None:
            self._pending_store.wait()
        self._pending_store = None
        self._transfer.release(self._host_buffer)


def _clone_if_aliased(rows: Tensor, memory: Tensor) -> Tensor:
    """Return rows that stay valid when ``memory`` is overwritten."""
    shared = rows.untyped_storage()._cdata == memory.untyped_storage()._cdata
    return rows.clone() if shared else rows
