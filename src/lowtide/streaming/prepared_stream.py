"""A captured program for one image size, with layout and certificate."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lowtide.core.errors import BudgetError, ModelError, UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.budget import Budget
from lowtide.memory.cache import cache_folder
from lowtide.memory.profiles import profile_of
from lowtide.streaming.capture.autocast_state import no_autocast
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.capture.opaque_module import OpaqueModule
from lowtide.streaming.capture.output_container import Repack
from lowtide.streaming.certificate import Certificate, certify
from lowtide.streaming.engine.executor import BandExecutor
from lowtide.streaming.engine.graph_replay import HINT
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.module_fingerprint import ModuleFingerprint, Place
from lowtide.streaming.pages.placement import PagePlacement, page_maker, placements
from lowtide.streaming.planner.dry_run import DryRunResult, dry_run
from lowtide.streaming.planner.layout_search import StreamLayout
from lowtide.streaming.planner.select import select_layout
from lowtide.streaming.specialize.cuda_graph import require_cuda_graphs

_AWAY = {"host": " on the host", "disk": " on disk"}
# Share of the budget for what the heap keeps and libraries allocate in addition to rows. Smaller on
# a GPU, where the allocator is simulated; without this, nine runs on an H200 took 1.00 to 1.01 of
# the budget.
_SHARE, _SHARE_ON_CARD, _LEAST = 0.1, 0.05, 16 * MIB
# The same for a CUDA graph, which has its own workspaces: with these, nine on an H200 held 0.96 to
# 1.17 times the predicted bytes.
_SHARE_RECORDED, _WORKSPACES = 0.1, 64 * MIB


@dataclass(frozen=True)
class StreamSettings:
    """Settings of a streamed module: budget, pages, scratch folder, CUDA graph."""

    budget: str | int | Budget
    pages: PagePlacement
    scratch: ScratchSpace
    recorded: bool
    certified: bool


@dataclass(frozen=True)
class PreparedStream:
    """A program for one image size, its layout, and its certificate.

    ``makeup`` is the module's fingerprint at capture; the attributes in ``written``, which the run
    itself sets, are ignored.
    """

    program: StreamProgram
    layout: StreamLayout
    sweep: BandExecutor
    certificate: Certificate | None
    makeup: ModuleFingerprint
    written: Set[Place]
    # By batch size, for the sizes whose images were proven independent.
    batches: dict[int, Repack] = field(default_factory=dict)

    def is_of(self, makeup: ModuleFingerprint) -> bool:
        """Return whether the module is unchanged since capture."""
        return self.makeup.same(makeup, self.written)

    @property
    def title(self) -> str:
        """Description for the user: how the program runs and what its rows take."""
        layout = self.layout
        pages = format_bytes(layout.pages_bytes) if layout.pages_bytes else "nothing"
        away = _AWAY.get(layout.pages, "") if layout.pages_bytes else ""
        if layout.held:
            away = f", {format_bytes(layout.away_bytes)} of them{away}"
        return (
            f"streamed, segments: {len(layout.segments)}, bands: up to {max(layout.bands)},"
            f" {format_bytes(layout.bytes)} for rows and result with {pages} of pages{away}"
            f"{self._blocks}"
        )

    @property
    def _blocks(self) -> str:
        """Describe the modules run as they are, and the halo each reads around a band."""
        found = [
            f"{node.target.name} (halo {node.target.halo} rows)"
            for node in self.program.graph.nodes
            if isinstance(node.target, OpaqueModule)
        ]
        return f"; not captured, halo measured: {', '.join(found)}" if found else ""


@dataclass(frozen=True)
class _BudgetShare:
    """The part of a budget that is reserved and not available to rows.

    ``fixed`` bytes plus a ``share`` of the budget, which is ``least_share`` bytes at least.
    """

    share: float
    fixed: int
    least_share: int

    @classmethod
    def of(cls, *, on_cpu: bool, recorded: bool, copies: int) -> _BudgetShare:
        """Return the reserve for a device; a CUDA graph holds ``copies`` bytes of copies."""
        if recorded:
            return cls(_SHARE_RECORDED, _WORKSPACES + copies, 0)
        return cls(_SHARE if on_cpu else _SHARE_ON_CARD, 0, _LEAST)

    def within(self, allowed: int) -> int:
        """Return the bytes that a budget leaves for rows."""
        return allowed - max(self.least_share, int(allowed * self.share)) - self.fixed

    def least(self, rows: int) -> int:
        """Return the smallest budget that leaves ``rows`` bytes for rows."""
        taken = rows + self.fixed
        return max(taken + self.least_share, math.ceil(taken / (1 - self.share)) + 1)


def prepare_stream(module: nn.Module, image: Tensor, wishes: StreamSettings) -> PreparedStream:
    """Capture, lay out and certify ``module`` for images like this one.

    Raises as `Streamed` does.
    """
    on_cpu, device = image.device.type == "cpu", str(image.device)
    if wishes.recorded:
        require_cuda_graphs(device, HINT)
    if on_cpu and wishes.pages == "host":
        raise UsageError("on a CPU, pages are in host memory anyway", hint="pages='memory'")
    program = lower_to_rows(capture(module, image))
    if program.rows[program.output].dim != 2:
        raise ModelError(
            "the output of this model is not an image: its rows do not run along the height"
        )
    with no_autocast(image.device.type):
        layout, piece = _laid_out(program, image, wishes)
    certificate = certify(module, image, program, cache_folder()) if wishes.certified else None
    make_page = page_maker(program, layout.pages, image.device, wishes.scratch, held=layout.held)
    sweep = BandExecutor(program, layout.segments, layout.bands, make_page, piece=piece)
    makeup = ModuleFingerprint(module, addresses=wishes.recorded)
    return PreparedStream(program, layout, sweep, certificate, makeup, program.graph.written)


def _laid_out(
    program: StreamProgram, image: Tensor, wishes: StreamSettings
) -> tuple[StreamLayout, int]:
    """Return the layout within the budget, and the bytes to allocate in one piece."""
    on_cpu, device = image.device.type == "cpu", str(image.device)
    profile = None if on_cpu else profile_of(device)
    allowed = Budget.parse(wishes.budget, device="cpu" if on_cpu else device).device_bytes
    # A CUDA graph reads and writes fixed memory, in addition to the image and result of the caller.
    copies = image.nbytes + program.bytes_of(program.output)
    room = _BudgetShare.of(on_cpu=on_cpu, recorded=wishes.recorded, copies=copies)
    told: dict[Any, DryRunResult] = {}

    def bytes_of(draft: StreamLayout) -> int:
        # A CUDA graph has a private memory pool, so a block allocated up front cannot serve its
        # run.
        in_one = not wishes.recorded
        found = told[draft.key] = dry_run(program, draft, held=True, profile=profile, in_one=in_one)
        return found.bytes

    try:
        layout = select_layout(
            program,
            room.within(allowed),
            bytes_of,
            placements(image.device, wishes.pages),
            mixed=wishes.pages == "auto",
        )
    except BudgetError as error:
        least = room.least(error.smallest or 0)
        raise BudgetError(
            f"this model cannot be streamed in {format_bytes(allowed)}: its bands and its result"
            f" need at least {format_bytes(least)}",
            smallest=least,
            hint=f"a budget of {-(-least // MIB)}MiB",
        ) from error
    return layout, told[layout.key].piece
