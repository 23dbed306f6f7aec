"""Placement of pages: device memory, host memory or disk."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, get_args

import torch

from lowtide.core.errors import UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.streaming.engine.executor import MakePage
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.pages.page import FeaturePage, MemoryPage
from lowtide.streaming.pages.spilled_page import DiskPage, HostPage
from lowtide.streaming.pages.transfer import HostTransfer, host_transfer_for

# Device memory, pinned host memory, or files.
Placement = Literal["memory", "host", "disk"]
PagePlacement = Placement | Literal["auto"]


def require_page_placement(requested: str) -> None:
    """Raise `UsageError` for pages that are none of `PagePlacement`."""
    known = "auto", *get_args(Placement)
    if requested not in known:
        raise UsageError(f"pages {requested!r} is not known", hint=", ".join(known))


def allowed_placements(device: torch.device, requested: PagePlacement) -> tuple[Placement, ...]:
    """Return the places allowed for pages; on the CPU, device memory is host memory."""
    if requested != "auto":
        return (requested,)
    return ("memory", "disk") if device.type == "cpu" else ("memory", "host", "disk")


def page_factory(
    program: StreamProgram,
    placement: Placement,
    device: torch.device,
    space: ScratchSpace | None = None,
    *,
    resident: Set[int] = frozenset(),
    disk_page_class: type[DiskPage] = DiskPage,
    transfer: HostTransfer | None = None,
) -> MakePage:
    """Return a factory of pages for a run on ``device``.

    Args:
        program: The captured program.
        placement: Where pages are kept: on the device, on its host (copied by ``transfer``), or in
            files.
        device: Device of the run.
        space: Scratch space of the files.
        resident: Pages that stay on the device in any case.
        disk_page_class: Class of pages in files.
        transfer: Host transfer of the device.
    """
    in_memory = memory_page_factory(program, device)
    if placement == "memory":
        return in_memory
    nodes, rows, space = program.graph.nodes, program.rows, space or ScratchSpace()
    carried = (transfer or host_transfer_for(device)) if placement == "host" else None

    def make(index: int) -> FeaturePage:
        if index in resident:
            return in_memory(index)
        like, dim = nodes[index].meta, rows[index].dim
        if carried is not None:
            return HostPage(like.shape, like.dtype, dim, carried)
        return disk_page_class(like.shape, like.dtype, dim, device, space)

    return make


def memory_page_factory(program: StreamProgram, device: torch.device) -> MakePage:
    """Return a factory of pages in the memory of a device."""

    def make(index: int) -> FeaturePage:
        return MemoryPage(program.rows[index].dim, device)

    return make
