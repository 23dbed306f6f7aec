"""Where pages are kept."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

import torch

from lowtide.core.scratch import ScratchSpace
from lowtide.streaming.engine.executor import MakePage
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.pages.disk_page import DiskPage
from lowtide.streaming.pages.host_page import HostPage
from lowtide.streaming.pages.page import MemoryPage, Page
from lowtide.streaming.pages.transfer import HostTransfer, host_transfer_for

# In the memory of the device, in that of its host, or in files.
Placement = Literal["memory", "host", "disk"]
PagePlacement = Placement | Literal["auto"]


def placements(device: torch.device, wanted: PagePlacement) -> tuple[Placement, ...]:
    """Where pages may be kept; the CPU's memory is that of the host."""
    if wanted != "auto":
        return (wanted,)
    return ("memory", "disk") if device.type == "cpu" else ("memory", "host", "disk")


def page_maker(
    program: StreamProgram,
    pages: Placement,
    device: torch.device,
    space: ScratchSpace | None = None,
    *,
    held: Set[int] = frozenset(),
    on_disk: type[DiskPage] = DiskPage,
    carrier: HostTransfer | None = None,
) -> MakePage:
    """Makes the pages of a run on ``device``: there, on its host (moved by ``carrier``), or
    ``on_disk`` in a ``space``; those that are ``held`` there in any case."""
    in_memory = memory_pages(program, device)
    if pages == "memory":
        return in_memory
    nodes, rows, space = program.graph.nodes, program.rows, space or ScratchSpace()
    carried = (carrier or host_transfer_for(device)) if pages == "host" else None

    def make(index: int) -> Page:
        if index in held:
            return in_memory(index)
        like, dim = nodes[index].like, rows[index].dim
        if carried is not None:
            return HostPage(like.shape, like.dtype, dim, carried)
        return on_disk(like.shape, like.dtype, dim, device, space)

    return make


def memory_pages(program: StreamProgram, device: torch.device) -> MakePage:
    """Pages in the memory of a device."""

    def make(index: int) -> Page:
        return MemoryPage(program.rows[index].dim, device)

    return make
