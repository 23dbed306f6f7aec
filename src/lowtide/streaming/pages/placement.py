"""Placement of pages: device memory, host memory or disk."""

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

# Device memory, pinned host memory, or files.
Placement = Literal["memory", "host", "disk"]
PagePlacement = Placement | Literal["auto"]


def placements(device: torch.device, wanted: PagePlacement) -> tuple[Placement, ...]:
    """Return the places allowed for pages; on the CPU, device memory is host memory."""
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
    """Return a factory of pages for a run on ``device``.

    Args:
        program: The captured program.
        pages: Where pages are kept: on the device, on its host (copied by ``carrier``), or in
            files.
        device: Device of the run.
        space: Scratch space of the files.
        held: Pages that stay on the device in any case.
        on_disk: Class of pages in files.
        carrier: Host transfer of the device.
    """
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
    """Return a factory of pages in the memory of a device."""

    def make(index: int) -> Page:
        return MemoryPage(program.rows[index].dim, device)

    return make
