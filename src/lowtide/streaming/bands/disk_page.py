"""Maps that are kept on disk between segments."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lowtide.core.errors import OutputError
from lowtide.core.units import format_bytes
from lowtide.streaming.bands.pages import memory_order
from lowtide.streaming.bands.program import Program
from lowtide.streaming.bands.spans import Spans, count
from lowtide.streaming.bands.sweep import MakePage, memory_pages


class DiskPage:
    """A map in a file without a name, row after row, so that any rows lie together.

    The file is gone when the process is, however that ends. Raises `OutputError` when the disk
    is full; what was written is given back then.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, dim: int, device: torch.device,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._dim, self._dtype, self.device = dim, dtype, device
        self._others = [side for place, side in enumerate(shape) if place != dim]
        self._row_bytes = torch.Size(self._others).numel() * dtype.itemsize
        self._order = list(range(len(shape)))
        self._folder = folder
        self._open()

    def _open(self) -> None:
        try:
            # Open as long as the page lives; closed when it goes.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="lowtide-page-", dir=self._folder
            )
        except OSError as error:
            where = self._folder or "the scratch folder"
            raise OutputError(f"no page can be kept in {where}: {error}",
                              hint="name another folder for scratch files") from error  # fmt: skip

    def write(self, first: int, rows: Tensor) -> None:
        """Put rows from ``first`` on in their place."""
        if rows.shape[self._dim] > 1:  # of a single row it says nothing
            self._order = memory_order(rows)
        self._put(first * self._row_bytes, rows.movedim(self._dim, 0).contiguous().cpu())

    def _put(self, at: int, plain: Tensor) -> None:
        try:
            self._file.seek(at)
            self._file.write(plain.flatten().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            self._file.close()
            if error.errno != errno.ENOSPC:
                raise
            size = format_bytes(plain.numel() * plain.itemsize)
            raise OutputError(
                f"the disk is full: {size} of a page could not be written",
                hint="free some space, name another folder for scratch files, or allow more memory",
            ) from error

    def read(self, spans: Spans) -> Tensor:
        """Rows, in memory of their own."""
        buffer = torch.empty(count(spans) * self._row_bytes, dtype=torch.uint8)
        at = 0
        for first, last in spans:
            size = (last - first) * self._row_bytes
            self._get(first * self._row_bytes, buffer[at : at + size])
            at += size
        rows = buffer.view(self._dtype).view(count(spans), *self._others)
        # Laid out as what was written, or other kernels would be run on it.
        laid = rows.movedim(0, self._dim).permute(self._order).contiguous()
        back = [self._order.index(place) for place in range(laid.dim())]
        return laid.permute(back).to(self.device)

    def _get(self, at: int, buffer: Tensor) -> None:
        self._file.seek(at)
        size = self._file.readinto(buffer.numpy().data)  # type: ignore[attr-defined]
        if size != len(buffer):
            raise AssertionError(f"bytes {at} to {at + len(buffer)} of a page are not all there")

    def keep(self, spans: Spans) -> None:
        """The file goes as a whole, when the page does."""

    def close(self) -> None:
        """Give the space back now."""
        self._file.close()


def page_maker(
    program: Program, pages: Literal["memory", "disk"], device: torch.device,
    folder: Path | None = None, on_disk: type[DiskPage] = DiskPage,
) -> MakePage:  # fmt: skip
    """Makes the pages of a run: in the memory of ``device``, or ``on_disk`` in ``folder``."""
    if pages == "memory":
        return memory_pages(program, device)
    nodes, rows = program.graph.nodes, program.rows

    def make(index: int) -> DiskPage:
        like = nodes[index].like
        return on_disk(like.shape, like.dtype, rows[index].dim, device, folder)

    return make
