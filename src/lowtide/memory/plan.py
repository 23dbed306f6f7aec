"""Plan of one run as pure data: what runs, predicted memory, refused candidates."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from lowtide.core.precision import Precision
from lowtide.core.units import format_bytes
from lowtide.memory.ledger import LedgerRow, Place

Accuracy = Literal["exact", "bounded"]


class Refusal(BaseModel):
    """A candidate that was not chosen, and the reason in one line."""

    model_config = ConfigDict(frozen=True)

    what: str
    reason: str


class Alternative(BaseModel):
    """A point of the Pareto front of memory and time: no candidate takes less of both."""

    model_config = ConfigDict(frozen=True)

    what: str
    accuracy: Accuracy
    predicted_bytes: int
    upper_bytes: int
    seconds: float
    chosen: bool = False


class BandPlan(BaseModel):
    """Parameters of strategy `streamed`: segments, bands, recomputation and spilling.

    ``cuts`` are the operators before which the network is cut into segments, ``again`` the number
    of multiply-adds per element up to which operators are recomputed rather than their results
    kept, ``bands`` the number of bands of each segment. ``pages`` says where results between
    segments are spilled, except those in ``held``, which stay in memory: ``pages_bytes`` is the
    most of all of them, ``away_bytes`` the most of those spilled. On a GPU the allocator is first
    given an arena of ``piece_bytes`` to split. ``operators`` is a digest of the network's
    operators, which the operator numbers refer to.
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
        """Identity among the band plans of one network and size, as the key of its layout."""
        return self.cuts, self.again, self.bands, self.pages, self.held


# Recovery steps, tried in this order when memory runs out in spite of a plan.
Recovery = Literal["again", "smaller batch", "smaller tile", "smaller plan"]
RECOVERY: tuple[Recovery, ...] = ("again", "smaller batch", "smaller tile", "smaller plan")


class Plan(BaseModel):
    """Execution plan of one image; the same plan serializes to the same JSON.

    Sizes are input pixels. ``run_pixels`` is the most that the network gets at once, all
    ``images_per_tile`` (color and alpha) counted. ``upper_bytes`` is what is compared with the
    budget. Tiles are all of one size, padded at the image's borders, and run row by row, so that
    the first one shows the memory of all; ``recovery`` lists what is tried if memory runs out
    nevertheless. ``heap`` is how the C heap of the command line's process treats freed blocks; "as
    it is" leaves it unchanged. ``model_sha256`` identifies the weights that the figures belong to.
    ``front`` is the Pareto front of memory and time, smallest first. ``banded`` is set where the
    strategy is `streamed`; tiles are then panels as high as the image, of which only a wide one has
    several, and ``run_pixels`` is meaningless. ``lanes`` is the number of devices that take tiles
    of the image at once, ``in_flight`` the number of batches in flight on a single one.
    ``compiled`` networks wait for PyTorch's compiler before the first tile, and ``recorded`` ones
    are replayed from a CUDA graph.
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
        """Return the ledger's sum at ``place``; on the CPU, host and device are one."""
        places = {"device", "host"} if self.device == "cpu" and place != "disk" else {place}
        return sum(row.upper if upper else row.value for row in self.ledger if row.place in places)

    @property
    def network_size(self) -> tuple[int, int]:
        """(height, width) of the network input of a streamed plan, run band by band."""
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
        """Summary for people: the strategy with its sizes."""
        more = ", compiled" if self.compiled else ", as a CUDA graph" if self.recorded else ""
        more += ", freed memory returned at once" if self.heap == "gives back" else ""
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
        pages = f"{format_bytes(self.banded.pages_bytes)} of intermediate results"
        if self.banded.held:
            pages += f", {format_bytes(self.banded.away_bytes)} of them"
        return f"{bands}, {pages} {_WHERE[self.banded.pages]}"


_WHERE = {"memory": "in memory", "host": "in host memory", "disk": "on disk"}
