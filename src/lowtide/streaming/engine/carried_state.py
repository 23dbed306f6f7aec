"""State carried from one run of a program to the next, freed and made band by band."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from lowtide.core.scratch import ScratchSpace
from lowtide.streaming.capture.graph import TensorMeta
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment, page_readers
from lowtide.streaming.pages.disk_page import DiskPage
from lowtide.streaming.pages.host_page import HostPage
from lowtide.streaming.pages.page import MemoryPage, Page, memory_order
from lowtide.streaming.pages.transfer import HostTransfer, host_transfer_for

# Pieces of a state tensor in memory: what no band reads any more is freed piece by piece.
_PIECES = 64
# Bands whose rows a page in host memory has on the device: its own and the next.
_PREFETCHED_BANDS = 2


class StateStore:
    """Where the tensors are kept that a run hands to the next, such as caches (1, C, 2, H, W).

    Args:
        placement: Device memory, host memory (pinned if the device is a GPU), or files.
        dim: Dim of the rows.
        device: Device of the runs.
        space: Scratch space of the files.
    """

    def __init__(
        self, placement: Placement, dim: int, device: torch.device, space: ScratchSpace
    ) -> None:
        self.placement: Placement = placement
        self._dim, self._device, self._space = dim, device, space
        # kept for all runs: pinning takes longer than copying
        self._transfer: HostTransfer | None = (
            host_transfer_for(device) if placement == "host" else None
        )

    def empty(self, metas: Sequence[TensorMeta]) -> CarriedState:
        """Return a state of tensors of these shapes, without rows."""
        state = CarriedState([], self._dim, metas)
        try:
            for meta in metas:
                state.pages.append(self._page(meta))
        except BaseException:
            state.close()
            raise
        return state

    def load(self, metas: Sequence[TensorMeta], file: BinaryIO) -> CarriedState:
        """Return the state of these shapes that `CarriedState.save` wrote to ``file``."""
        state = self.empty(metas)
        try:
            for index, meta in enumerate(metas):
                for first in range(0, meta.shape[self._dim], state.piece_rows(index)):
                    state.write(index, first, _read_rows(file, meta.dtype).to(self._device))
        except BaseException:
            state.close()
            raise
        return state

    def _page(self, meta: TensorMeta) -> Page:
        if self.placement == "disk":
            return DiskPage(meta.shape, meta.dtype, self._dim, self._device, self._space)
        if self._transfer is not None:
            return HostPage(meta.shape, meta.dtype, self._dim, self._transfer)
        return MemoryPage(self._dim, self._device)


@dataclass(frozen=True)
class CarriedState:
    """Pages of the tensors that a run hands to the next.

    Attributes:
        pages: Page of each tensor.
        dim: Dim of their rows.
        metas: Shape and dtype of the tensors.
    """

    pages: list[Page]
    dim: int
    metas: Sequence[TensorMeta]

    def piece_rows(self, index: int) -> int:
        """Return the rows of a tensor that are kept in one piece of memory."""
        return -(-self.metas[index].shape[self.dim] // _PIECES)

    def write(self, index: int, first: int, rows: Tensor) -> None:
        """Keep a copy of rows from row ``first`` on, such as (1, C, 2, rows, W)."""
        page = self.pages[index]
        if not isinstance(page, MemoryPage):
            page.write(first, rows)
            return
        for part in rows.split(self.piece_rows(index), self.dim):
            page.write(first, part.clone())
            first += part.shape[self.dim]

    def save(self, file: BinaryIO) -> None:
        """Write all rows to ``file``, piece by piece; `StateStore.load` makes the same state of it.

        Raises:
            OSError: They cannot be written.
        """
        for index, (page, meta) in enumerate(zip(self.pages, self.metas, strict=True)):
            count, step = meta.shape[self.dim], self.piece_rows(index)
            for first in range(0, count, step):
                _write_rows(file, page.read([(first, min(first + step, count))]))

    def take_pages(self) -> list[Page]:
        """Hand the pages over to a run, which closes them."""
        pages = [*self.pages]
        self.pages.clear()
        return pages

    def close(self) -> None:
        """Free the memory and disk space of the pages that no run has taken."""
        for page in self.take_pages():
            page.close()


def _write_rows(file: BinaryIO, rows: Tensor) -> None:
    """Write rows and their order in memory, which decides what kernels run on them."""
    order = memory_order(rows)
    stored = rows.permute(order).contiguous()
    header = {"order": order, "shape": list(stored.shape)}
    file.write(json.dumps(header).encode() + b"\n")
    file.write(stored.flatten().view(torch.uint8).cpu().numpy().data)


def _read_rows(file: BinaryIO, dtype: torch.dtype) -> Tensor:
    """Return rows as `_write_rows` got them."""
    header = json.loads(file.readline())
    stored = torch.empty(header["shape"], dtype=dtype)
    file.readinto(stored.flatten().view(torch.uint8).numpy().data)  # pyright: ignore[reportAttributeAccessIssue]
    return stored.permute([header["order"].index(place) for place in range(stored.dim())])


@dataclass(frozen=True)
class StateBytes:
    """Bytes on the device that chunks, result and state take while a program of ``chunks`` runs.

    The first ``chunks`` inputs and results of the program are those of its chunks, and the others
    the state. ``result_bytes`` are those of the result of all runs, held from the start; None where
    results of earlier runs are gone.
    """

    chunks: int
    placement: Placement
    result_bytes: int | None

    def __call__(
        self, program: StreamProgram, segments: Sequence[Segment], bands: Sequence[int]
    ) -> int:
        """Return the most bytes for a layout, apart from the rows at work."""
        if self.placement == "memory":
            old = program.graph.inputs[self.chunks :]
            more = _overlap_bytes(program, segments, bands, old)
        else:
            more = self._transfer_bytes(program, segments, bands)
        graph = program.graph
        copies = sum(map(program.bytes_of, graph.inputs[: self.chunks]))
        results = self.result_bytes
        if results is None:
            results = sum(map(program.bytes_of, graph.outputs[: self.chunks]))
        state = graph.outputs[self.chunks :] if self.placement == "memory" else []
        return copies + results + sum(map(program.bytes_of, state)) + more

    def _transfer_bytes(
        self, program: StreamProgram, segments: Sequence[Segment], bands: Sequence[int]
    ) -> int:
        """Return the bytes of rows on their way to the pages and from them, at the most."""
        graph, most = program.graph, 0
        old, new = {*graph.inputs[self.chunks :]}, {*graph.outputs[self.chunks :]}
        for segment, count in zip(segments, bands, strict=True):
            read = [program.bytes_of(one) // count for one in old & segment.reads]
            written = [program.bytes_of(one) // count for one in new & {*segment.outputs}]
            if self.placement == "host":  # two bands are there, and what was written last
                moved = _PREFETCHED_BANDS * sum(read) + sum(written)
            else:
                moved = max([*read, *written], default=0)
            most = max(most, moved)
        return most


def _overlap_bytes(
    program: StreamProgram, segments: Sequence[Segment], bands: Sequence[int], old: Sequence[int]
) -> int:
    """Return the most bytes of an old state in memory while the new one is made.

    Old rows are freed while new ones are made, so that both are there only for the band at work,
    and where several segments read them.
    """
    readers, overlap = page_readers(segments), [0.0] * len(segments)
    twice = 0
    for index in old:
        size, at = program.bytes_of(index), readers.get(index, [])
        if len(at) == 1:
            overlap[at[0]] += size * min(1.0, 1 / bands[at[0]] + 1 / _PIECES)
        else:
            twice += size
    return twice + int(max(overlap, default=0))
