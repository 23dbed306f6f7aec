"""What a run by bands holds, told by the run itself on tensors without bytes."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.core.heap import REUSED_BELOW, trim_heap
from lowtide.core.scratch import ScratchSpace
from lowtide.memory.estimating.calibration import NO_MARGIN
from lowtide.memory.estimating.card_scratch import CardScratch, convolution_settings
from lowtide.memory.estimating.pricing_cpu import price_on_cpu
from lowtide.memory.estimating.pricing_cuda import price_on_cuda
from lowtide.memory.estimating.scratch import HostScratch
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.store import OperatorStore, cache_folder
from lowtide.memory.tracing.fake import Faker
from lowtide.memory.tracing.trace import Trace
from lowtide.memory.tracing.tracer import Tracer
from lowtide.streaming.bands.carrier import Coming, Done, HostCarrier, Leaving, Room
from lowtide.streaming.bands.constants import Constants
from lowtide.streaming.bands.disk_page import DiskPage
from lowtide.streaming.bands.drafts import Layout, store_of
from lowtide.streaming.bands.pages import MemoryPage, Page
from lowtide.streaming.bands.piece import is_cut
from lowtide.streaming.bands.placement import page_maker
from lowtide.streaming.bands.program import Program
from lowtide.streaming.bands.spans import Spans, count
from lowtide.streaming.bands.sweep import Sweep, collect, empty_result

_UNSEEN = torch._C._DisableTorchDispatch
# The phase of a trace that a piece of memory is for.
_BANDS = "bands"
# Bands of a single segment after which all are alike: more than its halos reach over.
_ALIKE = 48
# What of a run is its own, on the CPU and on a card, whose allocator keeps what it rounds up.
_OWN = ("live activations", "scratch"), ("live activations", "scratch", "allocator")


@dataclass(frozen=True)
class Told:
    """``rows`` are those of a ledger, weights and inputs left out; ``bytes`` what bands, pages in
    memory and operators take at once by them, on a card if a ``piece`` of so many bytes is taken
    and given back before the run."""

    rows: tuple[LedgerRow, ...]
    bytes: int
    piece: int = 0


def tell(
    program: Program,
    layout: Layout,
    *,
    held: bool,
    profile: DeviceProfile | None = None,
    in_one: bool = True,
) -> Told:
    """What one image's run takes beside weights and input: on this machine's CPU, or on a card
    with that ``profile``.

    Storages are followed exactly. The scratch of operators is measured, each once; a card that is
    known by its ``profile`` only has that one's. On the CPU the row ``allocator`` is what lives in
    blocks that a heap may keep after they are freed; for a card storages pass through the
    allocator's simulation, if ``in_one`` with the piece with which they take least. ``held`` says
    whether the image is there as a whole and the result is put together, which then counts, or
    both are files that are read and written by rows.
    Remembered in the cache folder.
    """
    store = store_of(program)
    where = ""
    if profile is not None:
        in_one = in_one and is_cut()
        measured = convolution_settings() if program.graph.card else "not here"
        where = f" on {profile.name} {measured}{' in one' if in_one else ''}"
    key = f"takes {layout.key} {held}{where}"
    kept = store.get(key)
    if kept is None:
        rows, piece, sure = _measured(program, layout, held, profile, in_one)
        if sure:
            store.put(key, {"rows": [row.model_dump() for row in rows], "piece": piece})
            store.save()
    else:
        rows = tuple(LedgerRow.model_validate(row) for row in kept["rows"])
        piece = kept["piece"]
    own = _OWN[profile is not None]
    return Told(rows, sum(row.value for row in rows if row.name in own), piece)


def _measured(
    program: Program, layout: Layout, held: bool, profile: DeviceProfile | None, in_one: bool
) -> tuple[tuple[LedgerRow, ...], int, bool]:
    """The rows and the piece, and whether they hold another time too: an operator too large for
    the memory that is free now is taken at its bound."""
    trace, piece, sure = foretell(program, layout, held=held), 0, True
    if profile is None:
        scratch = HostScratch(OperatorStore(cache_folder()))
        rows = price_on_cpu(trace, scratch, NO_MARGIN).rows
        scratch.store.save()
        sure = not scratch.assumed
        rows = [_reusable(row, trace) if row.name == "allocator" else row for row in rows]
    else:
        card = program.graph.card
        measured = CardScratch(card) if card else None
        scratch = measured.of if measured else None
        priced = price_on_cuda(
            trace, profile, NO_MARGIN, scratch, in_one=_BANDS if in_one else None
        )
        rows, piece = priced.rows, priced.piece
        if measured:
            measured.store.save()
    # Thousands of events, and what was measured, would count against the run that follows.
    del trace
    trim_heap(collect=True)
    kept = (row for row in rows if row.name not in ("weights", "inputs", "margin"))
    return tuple(kept), piece, sure


def _reusable(row: LedgerRow, trace: Trace) -> LedgerRow:
    """The row with what lives at the peak in blocks that are not given back when they are freed."""
    sizes = trace.sizes_during(trace.peak_op(), held=False)
    small = sum(size for size in sizes if size < REUSED_BELOW)
    return row.model_copy(update={"value": small, "upper": small})


def foretell(program: Program, layout: Layout, *, held: bool) -> Trace:
    """The trace of one image's run: weights, bands, pages in memory, masks, and the operators."""
    faker = Faker()
    twin, weights = _twin(program, faker)
    tracer = Tracer(keep_calls=True, call=faker.calls)
    (given,) = program.graph.inputs
    like = program.graph.nodes[given].like
    sweep = Sweep(
        twin,
        layout.segments,
        layout.bands,
        page_maker(
            twin,
            layout.pages,
            torch.device("cpu"),
            held=layout.held,
            on_disk=_Unwritten,
            carrier=_Uncarried(),
        ),
        _Equal(twin, Constants(program)),
    )
    with faker.running():
        tracer.label(weights, "weights")
        source: Page = _Coming(like.shape, like.dtype)
        # It stays: it is the caller's.
        image = torch.empty(like.shape if held else 0, dtype=like.dtype)
        if held:
            tracer.label([image], "inputs")
            source = MemoryPage.of(image, 2)
        with tracer:
            tracer.mark("result")
            early = held and not program.graph.on_cpu
            result = empty_result(twin, torch.device("cpu")) if early else None
            tracer.mark(_BANDS)
            made = itertools.islice(sweep.run(source), _bands_told(layout))
            if held:
                collect(twin, made, result)
            deque(made, maxlen=0)  # none is held while the next band is computed
    return tracer.trace


def _bands_told(layout: Layout) -> int | None:
    """How many bands are followed, or None for all: where nothing is kept for a later segment,
    the bands after the first few take what these do."""
    return _ALIKE if len(layout.segments) == 1 else None


def _twin(program: Program, faker: Faker) -> tuple[Program, list[Tensor]]:
    """The program with fake weights, and these."""
    fakes = faker.tree({index: tensor.detach() for index, tensor in program.graph.tensors.items()})
    twin = copy.copy(program)
    twin.graph = copy.copy(program.graph)
    twin.graph.tensors = fakes
    return twin, list(fakes.values())


class _Equal(Constants):
    """Constants without bytes; which of them are equal is known of the real ones."""

    def __init__(self, program: Program, real: Constants) -> None:
        super().__init__(program)
        self._real = real

    def _key(self, part: Tensor, index: int, dim: int, place: int, grain: int) -> bytes:
        return self._once(self._real.key, index, dim, place, grain)

    def _told(
        self, part: Tensor, index: int, dim: int, place: int, grain: int
    ) -> list[bytes | None]:
        return self._once(self._real.told, index, dim, place, grain)

    def _note(self, index: int) -> None:
        """Nothing is remembered of tensors without bytes."""

    def _once(self, find: Callable[..., Any], *where: int) -> Any:
        known, about = self._program.told_equal, (find.__name__, where)
        if about not in known:
            with _UNSEEN():
                known[about] = find(*where)
        return known[about]


class _Coming:
    """Rows of a file, made when they are read."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self.device = torch.device("cpu")

    def read(self, spans: Spans) -> Tensor:
        """Rows of these spans."""
        return torch.empty(*self._shape[:2], count(spans), self._shape[3], dtype=self._dtype)

    def write(self, first: int, rows: Tensor) -> None:
        """A file's rows are not written to."""

    def expect(self, spans: Spans) -> None:
        """Nothing is read ahead."""

    def keep(self, spans: Spans) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class _Unwritten(DiskPage):
    """A page on disk without a disk."""

    def _open(self, space: ScratchSpace) -> None:
        pass

    def _put(self, at: int, run: Tensor) -> None:
        pass

    def _get(self, at: int, buffer: Tensor) -> None:
        pass

    def close(self) -> None:
        """There is no file."""


class _Uncarried(HostCarrier):
    """A card's carrier without a card: only what is on the device counts."""

    def room(self, nbytes: int) -> Room:
        """The host's memory is not the device's."""
        return Room(torch.empty(0))

    def out(self, run: Tensor, room: Room, at: int) -> Leaving:
        """The run stays until its memory is let go."""
        return Done(run)

    def back(
        self,
        room: Room,
        places: Sequence[tuple[int, int]],
        run: Tensor,
        after: Coming | None = None,
    ) -> Coming:
        """The memory on the device is there already."""
        return Done(run)
