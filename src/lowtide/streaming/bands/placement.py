"""Where pages are kept."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

import torch

from lowtide.core.scratch import ScratchSpace
from lowtide.streaming.bands.carrier import Carrier, carrier_of
from lowtide.streaming.bands.disk_page import DiskPage
from lowtide.streaming.bands.host_page import HostPage
from lowtide.streaming.bands.pages import MemoryPage, Page
from lowtide.streaming.bands.program import Program
from lowtide.streaming.bands.sweep import MakePage

# In the memory of the device, in that of its host, or in files.
Placement = Literal["memory", "host", "disk"]
Wanted = Placement | Literal["auto"]


def placements(device: torch.device, wanted: Wanted) -> tuple[Placement, ...]:
    """Where pages may be kept; the CPU's memory is that of the host."""
    if wanted != "auto":
        return (wanted,)
    return ("memory", "disk") if device.type == "cpu" else ("memory", "host", "disk")


def page_maker(
    program: Program,
    pages: Placement,
    device: torch.device,
    space: ScratchSpace | None = None,
    *,
    held: Set[int] = frozenset(),
    on_disk: type[DiskPage] = DiskPage,
    carrier: Carrier | None = None,
) -> MakePage:
    """Makes the pages of a run on ``device``: there, on its host (moved by ``carrier``), or
    ``on_disk`` in a ``space``; those that are ``held`` there in any case."""
    in_memory = memory_pages(program, device)
    if pages == "memory":
        return in_memory
    nodes, rows, space = program.graph.nodes, program.rows, space or ScratchSpace()
    carried = (carrier or carrier_of(device)) if pages == "host" else None

    def make(index: int) -> Page:
        if index in held:
            return in_memory(index)
        like, dim = nodes[index].like, rows[index].dim
        if carried is not None:
            return HostPage(like.shape, like.dtype, dim, carried)
        return on_disk(like.shape, like.dtype, dim, device, space)

    return make


def memory_pages(program: Program, device: torch.device) -> MakePage:
    """Pages in the memory of a device."""

    def make(index: int) -> Page:
        return MemoryPage(program.rows[index].dim, device)

    return make
