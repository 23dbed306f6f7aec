"""A module that gives the result of another one, band by band."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from lowtide.core.errors import BudgetError, ModelError, UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.budget import Budget
from lowtide.memory.profiles import profile_of
from lowtide.memory.store import cache_folder
from lowtide.streaming.bands.apart import require_apart
from lowtide.streaming.bands.block import Block
from lowtide.streaming.bands.capture import capture
from lowtide.streaming.bands.certify import Certificate, certify, tf32_is_allowed
from lowtide.streaming.bands.choose import choose
from lowtide.streaming.bands.drafts import Layout
from lowtide.streaming.bands.foretell import Told, tell
from lowtide.streaming.bands.pages import MemoryPage
from lowtide.streaming.bands.piece import set_aside
from lowtide.streaming.bands.placement import Placement, Wanted, page_maker, placements
from lowtide.streaming.bands.program import Program, track
from lowtide.streaming.bands.replays import HINT, Replays
from lowtide.streaming.bands.sweep import Sweep, collect, empty_result
from lowtide.streaming.recorded import require_graphs

# Sizes of image whose programs are kept.
_KEPT = 4
_AWAY = {"host": " on the host", "disk": " on disk"}
# Of the budget, for what the heap keeps and libraries make beside rows. Less on a card, where the
# allocator's habits are told too; without these nine runs on an H200 took 1.00 to 1.01 of it.
_SHARE, _SHARE_ON_CARD, _LEAST = 0.1, 0.05, 16 * MIB
# The same for a recording, which has workspaces of its own: nine on an H200 held 0.96 to 1.17 times
# what was told, with these.
_SHARE_RECORDED, _WORKSPACES = 0.1, 64 * MIB


@dataclass(frozen=True)
class Prepared:
    """A program for one size of image, how it is run, and its certificate."""

    program: Program
    layout: Layout
    sweep: Sweep
    certificate: Certificate | None
    # Numbers of images that were shown to be independent of each other.
    batches: set[int] = field(default_factory=set)

    @property
    def title(self) -> str:
        """For people: how it is run and what its rows take."""
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
        """Modules that are run as they are, with the rows around a band that they look at."""
        found = [
            f"{node.target.name} ({node.target.halo} rows around a band)"
            for node in self.program.graph.nodes if isinstance(node.target, Block)
        ]  # fmt: skip
        return f"; without a graph, by trial: {', '.join(found)}" if found else ""


@dataclass(frozen=True)
class _Room:
    """What of a budget is not for rows: ``fixed`` bytes, and a ``share`` of ``least_share`` bytes
    at least."""

    share: float
    fixed: int
    least_share: int

    def within(self, allowed: int) -> int:
        """What a budget leaves to rows."""
        return allowed - max(self.least_share, int(allowed * self.share)) - self.fixed

    def least(self, rows: int) -> int:
        """The least budget that leaves as much to them."""
        taken = rows + self.fixed
        return max(taken + self.least_share, math.ceil(taken / (1 - self.share)) + 1)


class Streamed(nn.Module):
    """``module`` with the same call, run by bands of rows within a budget.

    Takes (batch, channels, height, width) and returns what ``module`` returns for it, equal to
    rounding (accuracy class: exact). Images of a batch are run one after another, once it is shown
    that they go through the module apart from each other; a module that mixes them is refused.
    Memory, beside weights, input and result: the bands, the pages between them, and what single
    operators take for themselves (`explain` tells it).

    The first image of a size takes seconds longer: the graph is captured, and compared with the
    module itself on a small image; that comparison is remembered on disk.

    If ``recorded``, an NVIDIA card is told of the run's kernels once, with the second image of a
    size, and starts them by itself from then on: the same numbers sooner, where a light model's
    kernels are over before Python issues the next. What the run takes, and a copy of the image, is
    then held until an image of another size comes or the module goes; pages stay on the card.

    Raises `ModelError` for a module that cannot be streamed exactly, and `BudgetError`, which
    names the least that would do. Source of the method: bands as in fused-layer networks
    (MCUNetV2, arXiv 2110.15352), with norms and windows exact.
    """

    def __init__(
        self, module: nn.Module, *, budget: str | int | Budget = "auto",
        pages: Wanted = "auto", scratch: Path | None = None,
        recorded: bool = False, certified: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if pages not in get_args(Placement) and pages != "auto":
            raise UsageError(
                f"pages {pages!r} is not known", hint=f"auto, {', '.join(get_args(Placement))}"
            )
        if recorded and pages not in ("auto", "memory"):
            raise UsageError(f"a recorded run has no pages on {pages}", hint=HINT)
        self.module = module
        self._budget, self._scratch = budget, ScratchSpace(scratch)
        self._place: Wanted = "memory" if recorded else pages
        self._replays = Replays() if recorded else None
        self._certified = certified
        self._known: OrderedDict[object, Prepared] = OrderedDict()

    def forward(self, image: Tensor) -> Tensor:
        """The result for each image of the batch."""
        _check(image)
        self._require_apart(image)
        results = [self._one(single) for single in image.detach().split(1)]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _require_apart(self, images: Tensor) -> None:
        known = self.prepare(images).batches
        if self._certified and len(images) > 1 and len(images) not in known:
            require_apart(self.module, images.detach(), cache_folder())
            known.add(len(images))

    def rows(self, image: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first row, (1, channels, rows, width)) of the result of one image, from the top down:
        for results that are never held as a whole."""
        _check(image)
        yield from self.prepare(image).sweep.run(MemoryPage.of(image.detach(), 2))

    def explain(self, image: Tensor) -> str:
        """How an image of this size would be run."""
        _check(image)
        more = "" if self._replays is None else "; recorded with the second image"
        return self.prepare(image).title + more

    def prepare(self, image: Tensor) -> Prepared:
        """The program for images like this one; made once for each size."""
        # What convolutions take for themselves depends on TF32 too.
        key = (*image.shape[1:], image.dtype, image.device, tf32_is_allowed())
        if key not in self._known:
            self._known[key] = self._prepared(image[:1])
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _prepared(self, image: Tensor) -> Prepared:
        if self._replays is not None:
            require_graphs(str(image.device), HINT)
        program = track(capture(self.module, image))
        if program.rows[program.output].dim != 2:
            raise ModelError("the result of this model is no image: its rows are not its height")
        on_cpu = image.device.type == "cpu"
        if on_cpu and self._place == "host":
            raise UsageError(
                "the memory of the host is where a CPU's pages are anyway", hint="pages='memory'"
            )
        device = "cpu" if on_cpu else str(image.device)
        profile = None if on_cpu else profile_of(device)
        allowed = Budget.parse(self._budget, device=device).device_bytes
        # A recording reads and writes where it did, beside the image and the result that is given.
        copies = image.nbytes + program.bytes_of(program.output)
        room = self._room(on_cpu, copies)
        # A recording has memory of its own, which no piece of a run's can be.
        in_one = self._replays is None
        told: dict[object, Told] = {}

        def bytes_of(draft: Layout) -> int:
            found = tell(program, draft, held=True, profile=profile, in_one=in_one)
            told[draft.key] = found
            return found.bytes

        try:
            layout = choose(
                program, room.within(allowed), bytes_of,
                placements(image.device, self._place), mixed=self._place == "auto",
            )
        except BudgetError as error:
            least = room.least(error.smallest or 0)
            raise BudgetError(
                f"no bands of this model fit in {format_bytes(allowed)}: with its result they take"
                f" {format_bytes(least)}",
                smallest=least, hint=f"a budget of {-(-least // MIB)}MiB",
            ) from error  # fmt: skip
        certificate = None
        if self._certified:
            certificate = certify(self.module, image, program, cache_folder())
        make_page = page_maker(
            program, layout.pages, image.device, self._scratch, held=layout.held
        )
        sweep = Sweep(
            program, layout.segments, layout.bands, make_page, piece=told[layout.key].piece
        )
        return Prepared(program, layout, sweep, certificate)

    def _room(self, on_cpu: bool, copies: int) -> _Room:
        """What is not for rows; a recording has so many bytes of copies."""
        if self._replays is not None:
            return _Room(_SHARE_RECORDED, _WORKSPACES + copies, 0)
        return _Room(_SHARE if on_cpu else _SHARE_ON_CARD, 0, _LEAST)

    def _one(self, image: Tensor) -> Tensor:
        run = self._by_bands
        return run(image) if self._replays is None else self._replays(run, image)

    def _by_bands(self, image: Tensor) -> Tensor:
        prepared, device = self.prepare(image), image.device
        if device.type == "cpu":
            return collect(prepared.program, self.rows(image))
        program = prepared.program
        aside = set_aside(prepared.sweep.piece, device, program.bytes_of(program.output))
        result = empty_result(program, device)
        del aside  # or the run could not be cut out of it
        return collect(program, self.rows(image), result)


def stream(
    module: nn.Module, *, budget: str | int | Budget = "auto",
    pages: Wanted = "auto", scratch: Path | None = None, recorded: bool = False,
) -> Streamed:  # fmt: skip
    """``module`` with the same call, in the memory of ``budget``: see `Streamed`.

        small = lowtide.stream(model.eval(), budget="1GiB")
        result = small(image)            # equal to model(image) but for rounding

    ``pages`` says where maps are kept that no band can do without: in ``"memory"`` of the image's
    device, for a card in that of its ``"host"``, on ``"disk"`` (in a file of the folder ``scratch``
    that has no name and vanishes with the module; between calls up to 1 GiB of it stays for the
    next), or wherever the budget lets them: with ``"auto"`` in memory as many as fit, and the
    others in the next of these places. ``recorded`` makes a CUDA graph of the run, for many images
    of one size on a card.
    """
    return Streamed(module, budget=budget, pages=pages, scratch=scratch, recorded=recorded)


def _check(image: Tensor) -> None:
    if image.dim() != 4 or 0 in image.shape:
        shape = "×".join(map(str, image.shape)) or "()"
        raise UsageError(f"streaming wants (batch, channels, height, width), not {shape}")
    if not image.is_floating_point():
        raise UsageError(f"streaming wants floating point numbers, not {image.dtype}")
    if torch.is_grad_enabled() and image.requires_grad:
        raise UsageError("a streamed module has no gradients", hint="with torch.no_grad():")
