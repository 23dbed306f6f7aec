"""A plan is pure data: what will be run, what it will use, and why not otherwise."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from lowtide.core.precision import Precision
from lowtide.core.units import format_bytes
from lowtide.memory.ledger import LedgerRow, Place

Accuracy = Literal["exact", "bounded"]


class Refusal(BaseModel):
    """A candidate that was not chosen, in one line."""

    model_config = ConfigDict(frozen=True)

    what: str
    reason: str


class Alternative(BaseModel):
    """A point of the front between memory and time: no candidate takes less of both."""

    model_config = ConfigDict(frozen=True)

    what: str
    accuracy: Accuracy
    predicted_bytes: int
    upper_bytes: int
    seconds: float
    chosen: bool = False


class BandPlan(BaseModel):
    """How strategy `streamed` runs.

    ``cuts`` are operators before which the network is cut into segments, ``again`` the work for
    each number up to which operators are run again rather than their results kept, ``bands`` how
    many bands each segment is run in. Of what is kept between segments ``pages`` says where it
    lies, but for the results in ``held``, which stay in memory: ``pages_bytes`` is the most of all,
    ``away_bytes`` of what lies elsewhere. A card's allocator is given a piece of ``piece_bytes`` to
    cut up. ``operators`` is a digest of the network's operators, which the numbers belong to.
    """

    model_config = ConfigDict(frozen=True)

    cuts: tuple[int, ...]
    again: int = 0
    bands: tuple[int, ...]
    pages: Literal["memory", "host", "disk"]
    held: tuple[int, ...] = ()
    pages_bytes: int
    away_bytes: int = 0
    piece_bytes: int = 0
    operators: str

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others of one network and size, as the key of its layout does."""
        return self.cuts, self.again, self.bands, self.pages, self.held


# What is tried in this order when memory runs out in spite of a plan.
Recovery = Literal["again", "smaller batch", "smaller tile", "smaller plan"]
RECOVERY: tuple[Recovery, ...] = ("again", "smaller batch", "smaller tile", "smaller plan")


class Plan(BaseModel):
    """How one image will be run. JSON in, JSON out; the same plan gives the same file.

    Sizes are input pixels. ``run_pixels`` is the most that the network gets at once, all
    ``images_per_tile`` (color and alpha) counted. ``upper_bytes`` is what is held against the
    budget. Tiles are all of one size, padded where the image ends, and run row by row, so that
    the first one shows what all of them take; ``recovery`` is what follows if memory runs out
    nevertheless. ``heap`` is what the C heap of the command line's process does with freed blocks;
    "as it is" leaves it alone. ``model_sha256`` names the weights that the figures are of.
    ``front`` are the candidates that nothing beats in both memory and time, from the smallest up.
    ``banded`` is set where the strategy is `streamed`; tiles are then panels as high as the image,
    of which only a wide one has several, and ``run_pixels`` means nothing. ``lanes`` are how many
    devices take tiles of the image at once, and ``in_flight`` how many batches are on their way to
    a single one and back. ``compiled`` networks wait for PyTorch's compiler before the first tile,
    and ``recorded`` ones are replayed from a CUDA graph.
    """

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    strategy: str
    accuracy: Accuracy
    device: str
    precision: Precision
    channels_last: bool
    width: int
    height: int
    padded_width: int
    padded_height: int
    scale: int
    align: int
    minimum: int = 0
    square: bool = False
    tile_width: int
    tile_height: int
    overlap: int
    blend: int
    batch: int
    tiles: int
    images_per_tile: int
    run_pixels: int
    seam_share: float
    seconds: float
    ledger: tuple[LedgerRow, ...]
    budget_bytes: int = 0
    host_budget_bytes: int = 0
    choice: str = ""
    refused: tuple[Refusal, ...] = ()
    front: tuple[Alternative, ...] = ()
    recovery: tuple[Recovery, ...] = RECOVERY
    heap: Literal["as it is", "keeps", "gives back"] = "as it is"
    model_sha256: str = ""
    banded: BandPlan | None = None
    lanes: int = 1
    in_flight: int = 1
    compiled: bool = False
    recorded: bool = False

    def bytes_at(self, place: Place, *, upper: bool = False) -> int:
        """Sum of the ledger at one place; on the CPU the host is the device."""
        places = {"device", "host"} if self.device == "cpu" and place != "disk" else {place}
        return sum(row.upper if upper else row.value for row in self.ledger if row.place in places)

    @property
    def network_size(self) -> tuple[int, int]:
        """(height, width) of what the network is given by a streamed plan, band by band."""
        return self.padded_height, self.tile_width

    @property
    def predicted_bytes(self) -> int:
        """Expected peak on the compute device."""
        return self.bytes_at("device")

    @property
    def upper_bytes(self) -> int:
        """Upper bound of the peak on the compute device."""
        return self.bytes_at("device", upper=True)

    @property
    def title(self) -> str:
        """For people: the strategy with its sizes."""
        more = ", compiled" if self.compiled else ", recorded" if self.recorded else ""
        more += ", memory given back at once" if self.heap == "gives back" else ""
        if self.banded is not None:
            return f"{self.strategy} {self._bands_title}{more}"
        if self.tiles == 1:
            return f"{self.strategy} {self.width}×{self.height}{more}"
        batch = f", {self.batch} at a time" if self.batch > 1 else ""
        lanes = f", on {self.lanes} devices" if self.lanes > 1 else ""
        lanes += f", {self.in_flight} in flight" if self.in_flight > 1 else ""
        return (
            f"{self.strategy} {self.tile_width}×{self.tile_height}"
            f" overlap {self.overlap} ({self.tiles} tiles{batch}{lanes}){more}"
        )

    @property
    def _bands_title(self) -> str:
        assert self.banded is not None
        segments, most = len(self.banded.bands), max(self.banded.bands)
        parts = f"{segments} segments of" if segments > 1 else "in"
        bands = f"{parts} up to {most} bands" if segments > 1 else f"{parts} {most} bands"
        bands += f" and {self.tiles} panels" if self.tiles > 1 else ""
        if not self.banded.pages_bytes:
            return bands
        pages = f"{format_bytes(self.banded.pages_bytes)} of pages"
        if self.banded.held:
            pages += f", {format_bytes(self.banded.away_bytes)} of them"
        return f"{bands}, {pages} {_WHERE[self.banded.pages]}"


_WHERE = {"memory": "in memory", "host": "on the host", "disk": "on disk"}
