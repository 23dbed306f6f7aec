"""Plan of one run as pure data: what runs, predicted memory, refused candidates."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from lowtide.core.precision import Precision
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes
from lowtide.memory.ledger import LedgerRow, Place

Accuracy = Literal["exact", "bounded"]


class Refusal(BaseModel):
    """A candidate that was not chosen, and the reason in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    reason: str


class Alternative(BaseModel):
    """A point of the Pareto front of memory and time: no candidate takes less of both."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    accuracy: Accuracy
    predicted_bytes: int
    upper_bytes: int
    seconds: float
    chosen: bool = False


class BandPlan(BaseModel):
    """Parameters of strategy `streamed`: segments, bands, recomputation and spilling.

    ``cuts`` are the operators before which the network is cut into segments, ``recompute_limit``
    the number of multiply-adds per element up to which operators are recomputed rather than their
    results kept, ``bands`` the number of bands of each segment. ``pages`` says where results
    between segments are spilled, except those in ``resident``, which stay in memory:
    ``intermediate_peak_bytes`` is the most of all of them, ``spilled_peak_bytes`` the most of those
    spilled. On a GPU the allocator is first given an arena of ``arena_bytes`` to split.
    ``graph_digest`` is a digest of the network's operators, which the operator numbers refer to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cuts: tuple[int, ...]
    recompute_limit: int = 0
    bands: tuple[int, ...]
    pages: Literal["memory", "host", "disk"]
    resident: tuple[int, ...] = ()
    intermediate_peak_bytes: int
    spilled_peak_bytes: int = 0
    arena_bytes: int = 0
    graph_digest: str

    @property
    def layout_key(self) -> tuple[object, ...]:
        """Identity among the band plans of one network and size, as the key of its layout."""
        return self.cuts, self.recompute_limit, self.bands, self.pages, self.resident


# Recovery steps, tried in this order when memory runs out in spite of a plan.
Recovery = Literal["retry", "smaller batch", "smaller tile", "smaller plan"]
RECOVERY: tuple[Recovery, ...] = ("retry", "smaller batch", "smaller tile", "smaller plan")


class Plan(BaseModel):
    """Execution plan of one image; the same plan serializes to the same JSON.

    Sizes are input pixels. ``run_pixels`` is the most that the network gets at once, all
    ``images_per_tile`` (color and alpha) counted. ``upper_bytes`` is what is compared with the
    budget. Tiles are all of one size, padded at the image's borders, and run row by row, so that
    the first one shows the memory of all; ``recovery`` lists what is tried if memory runs out
    nevertheless. ``heap`` is how the C heap of the command line's process treats freed blocks;
    "unchanged" leaves it alone. ``model_sha256`` identifies the weights that the figures belong to.
    ``pareto_front`` is the Pareto front of memory and time, smallest first. ``band_plan`` is set
    where the strategy is `streamed`; tiles are then panels as high as the image, of which only a
    wide one has several, and ``run_pixels`` is meaningless. ``device_count`` is the number of
    devices that take tiles of the image at once, ``in_flight`` the number of batches in flight on a
    single one. ``compiled`` networks wait for PyTorch's compiler before the first tile, and
    ``cuda_graph`` ones are replayed from a CUDA graph.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
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
    pareto_front: tuple[Alternative, ...] = ()
    recovery: tuple[Recovery, ...] = RECOVERY
    heap: Literal["unchanged", "cache", "trim"] = "unchanged"
    model_sha256: str = ""
    band_plan: BandPlan | None = None
    device_count: int = 1
    in_flight: int = 1
    compiled: bool = False
    cuda_graph: bool = False

    def bytes_at(self, place: Place, *, upper: bool = False) -> int:
        """Return the ledger's sum at ``place``; on the CPU, host and device are one."""
        places = {"device", "host"} if self.device == "cpu" and place != "disk" else {place}
        total = 0
        for row in self.ledger:
            if row.place in places:
                total += row.upper if upper else row.value
        return total

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
        more = ", compiled" if self.compiled else ", as a CUDA graph" if self.cuda_graph else ""
        more += ", freed memory returned at once" if self.heap == "trim" else ""
        if self.band_plan is not None:
            return f"{self.strategy} {self._bands_title}{more}"
        if self.tiles == 1:
            return f"{self.strategy} {self.width}×{self.height}{more}"
        batch = f", {self.batch} at a time" if self.batch > 1 else ""
        parallel = f", on {self.device_count} devices" if self.device_count > 1 else ""
        parallel += f", {self.in_flight} in flight" if self.in_flight > 1 else ""
        return (
            f"{self.strategy} {self.tile_width}×{self.tile_height}"
            f" overlap {self.overlap} ({self.tiles} tiles{batch}{parallel}){more}"
        )

    @property
    def _bands_title(self) -> str:
        assert self.band_plan is not None
        segments, most = len(self.band_plan.bands), max(self.band_plan.bands)
        parts = f"{segments} segments of" if segments > 1 else "in"
        bands = f"{parts} up to {most} bands" if segments > 1 else f"{parts} {most} bands"
        bands += f" and {self.tiles} panels" if self.tiles > 1 else ""
        if not self.band_plan.intermediate_peak_bytes:
            return bands
        pages = f"{format_bytes(self.band_plan.intermediate_peak_bytes)} of intermediate results"
        if self.band_plan.resident:
            pages += f", {format_bytes(self.band_plan.spilled_peak_bytes)} of them"
        return f"{bands}, {pages} {_SPILL_TITLES[self.band_plan.pages]}"


_SPILL_TITLES = {"memory": "in memory", "host": "in host memory", "disk": "on disk"}
