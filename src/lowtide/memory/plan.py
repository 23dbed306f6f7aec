"""Plan of one run as pure data: its strategy, its ledger of memory, and refused candidates.

Every estimate and report has a ledger of such rows, too.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from lowtide.core.option import Precision
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes

# Recovery steps, tried in this order when memory runs out in spite of a plan.
Recovery = Literal["retry", "smaller batch", "smaller tile", "smaller plan"]


class ImageGeometry(BaseModel, frozen=True, extra="forbid"):
    """Sizes of an image in input pixels, and the size rule of the model that it is padded to.

    ``network_inputs`` is the number of network inputs made of each part: color and alpha count
    separately.
    """

    width: int
    height: int
    padded_width: int
    padded_height: int
    scale: int
    align: int
    minimum: int = 0
    square: bool = False
    network_inputs: int

    @property
    def padded_size(self) -> tuple[int, int]:
        """(height, width) of the padded image."""
        return self.padded_height, self.padded_width


class WholeStrategy(BaseModel, frozen=True, extra="forbid"):
    """The whole image at once.

    Where memory runs out it is divided into parts that share ``overlap`` pixels.
    """

    name: Literal["whole"] = "whole"
    overlap: int = 0
    recovery: tuple[Recovery, ...] = ("retry", "smaller tile", "smaller plan")

    # A whole image runs as a single tile.
    tiles: ClassVar[int] = 1
    batch: ClassVar[int] = 1
    blend: ClassVar[int] = 0
    seam_share: ClassVar[float] = 0.0
    device_count: ClassVar[int] = 1
    in_flight: ClassVar[int] = 1

    def network_size(self, image: ImageGeometry) -> tuple[int, int]:
        """Return (height, width) of the network's input."""
        return image.padded_size

    def title(self, image: ImageGeometry) -> str:
        """Return a summary for people."""
        return f"whole {image.width}×{image.height}"


class TiledStrategy(BaseModel, frozen=True, extra="forbid"):
    """Tiles of one size, padded at the image's borders, and run row by row.

    The first tile shows the memory of all. ``run_pixels`` is the most that the network gets at
    once, all network inputs counted, and ``seam_share`` the share of pixels in overlaps.
    ``device_count`` is the number of devices that take tiles of the image at once, ``in_flight``
    the number of batches in flight on a single one.
    """

    name: Literal["tiled"] = "tiled"
    tile_width: int
    tile_height: int
    overlap: int
    blend: int
    tiles: int
    batch: int = 1
    run_pixels: int
    seam_share: float = 0.0
    device_count: int = 1
    in_flight: int = 1
    recovery: tuple[Recovery, ...] = ("retry", "smaller batch", "smaller tile", "smaller plan")

    def network_size(self, image: ImageGeometry) -> tuple[int, int]:
        """Return (height, width) of the network's input."""
        return self.tile_height, self.tile_width

    def title(self, image: ImageGeometry) -> str:
        """Return a summary for people."""
        if self.tiles == 1:
            return f"tiled {image.width}×{image.height}"
        batch = f", {self.batch} at a time" if self.batch > 1 else ""
        parallel = f", on {self.device_count} devices" if self.device_count > 1 else ""
        parallel += f", {self.in_flight} in flight" if self.in_flight > 1 else ""
        return (
            f"tiled {self.tile_width}×{self.tile_height}"
            f" overlap {self.overlap} ({self.tiles} tiles{batch}{parallel})"
        )


class StreamedStrategy(BaseModel, frozen=True, extra="forbid"):
    """Bands of rows: segments, bands and spilling.

    ``cuts`` are the operators before which the network is cut into segments, ``bands`` the number
    of bands of each segment. ``pages`` says where results between segments are spilled, except
    those in ``resident``, which stay in memory: ``intermediate_peak_bytes`` is the most of all of
    them, ``spilled_peak_bytes`` the most of those spilled. ``graph_digest`` is a digest of the
    network's operators, which the operator numbers refer to. A wide image runs in ``panels`` as
    high as the image, one after another.
    """

    name: Literal["streamed"] = "streamed"
    cuts: tuple[int, ...]
    bands: tuple[int, ...]
    pages: Literal["memory", "host", "disk"]
    resident: tuple[int, ...] = ()
    intermediate_peak_bytes: int
    spilled_peak_bytes: int = 0
    graph_digest: str
    panels: int = 1
    panel_width: int
    panel_overlap: int = 0
    recovery: tuple[Literal["smaller plan"], ...] = ("smaller plan",)

    # Bands run in place of a single tile.
    tiles: ClassVar[int] = 1
    batch: ClassVar[int] = 1
    seam_share: ClassVar[float] = 0.0
    device_count: ClassVar[int] = 1

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_gone(cls, values: Any) -> Any:
        """Read a plan of 0.2, which says what this version does not do."""
        if isinstance(values, dict):
            values = dict(values)
            for name, what in _GONE.items():
                if values.pop(name, 0):
                    raise ValueError(
                        f"{name}: this version does not {what}, as 0.2 did; make the plan again"
                    )
        return values

    @property
    def layout_key(self) -> tuple[object, ...]:
        """Identity among the strategies of one network and size, as the key of its layout."""
        return self.cuts, self.bands, self.pages, self.resident

    def network_size(self, image: ImageGeometry) -> tuple[int, int]:
        """Return (height, width) of the network's input, which runs band by band."""
        return image.padded_height, self.panel_width

    def title(self, image: ImageGeometry) -> str:
        """Return a summary for people."""
        segments, most = len(self.bands), max(self.bands)
        bands = f"{segments} segments of up to {most}" if segments > 1 else f"in {most}"
        panels = f" and {self.panels} panels" if self.panels > 1 else ""
        bands = f"streamed {bands} bands{panels}"
        if not self.intermediate_peak_bytes:
            return bands
        pages = f"{format_bytes(self.intermediate_peak_bytes)} of intermediate results"
        if self.resident:
            pages += f", {format_bytes(self.spilled_peak_bytes)} of them"
        return f"{bands}, {pages} {_SPILL_TITLES[self.pages]}"


# Strategies that run tiles, of which a whole image is one.
TileStrategy = WholeStrategy | TiledStrategy
Strategy = TileStrategy | StreamedStrategy

_GONE = {
    "arena_bytes": "cut bands out of an arena of GPU memory",
    "recompute_limit": "compute convolutions twice rather than keep their results",
}
_SPILL_TITLES = {"memory": "in memory", "host": "in host memory", "disk": "on disk"}


Place = Literal["device", "host", "disk"]
Origin = Literal["known", "traced", "probed", "simulated", "prior", "calibrated", "measured"]


# A quarter of a model's own memory: the report of a folder keeps tens of rows for each file.
@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class LedgerRow:
    """One item of memory: expected bytes, upper bound, place and origin of the figure."""

    name: str
    place: Place
    value: int
    upper: int
    origin: Origin


def device_row(name: str, value: int, origin: Origin, upper: int | None = None) -> LedgerRow:
    """Return a row of the device; its upper bound is ``value``, or more if given."""
    upper = value if upper is None else max(value, upper)
    return LedgerRow(name=name, place="device", value=value, upper=upper, origin=origin)


Accuracy = Literal["exact", "bounded"]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class RefusedCandidate:
    """A candidate that was not chosen, and the reason in one line."""

    title: str
    reason: str


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class ParetoPlan:
    """A point of the Pareto front of memory and time: no candidate takes less of both."""

    title: str
    accuracy: Accuracy
    predicted_bytes: int
    upper_bytes: int
    seconds: float
    chosen: bool = False


class Plan(BaseModel, frozen=True, extra="forbid"):
    """Execution plan of one image; the same plan serializes to the same JSON.

    What depends on the strategy stands in ``strategy``, what is of the image in ``image``.
    ``upper_bytes`` is what is compared with the budget. ``heap`` is how the C heap of the command
    line's process treats freed blocks; "unchanged" leaves it alone. ``model_sha256`` identifies the
    weights that the figures belong to. ``pareto_front`` is the Pareto front of memory and time,
    smallest first. ``compiled`` networks wait for PyTorch's compiler before the first tile, and
    ``cuda_graph`` ones are replayed from a CUDA graph.
    """

    schema_version: int = SCHEMA_VERSION
    strategy: Strategy = Field(discriminator="name")
    accuracy: Accuracy
    device: str
    precision: Precision
    channels_last: bool
    compiled: bool = False
    cuda_graph: bool = False
    heap: Literal["unchanged", "cache", "trim"] = "unchanged"
    image: ImageGeometry
    model_sha256: str = ""
    seconds: float
    budget_bytes: int = 0
    host_budget_bytes: int = 0
    choice: str = ""
    ledger: tuple[LedgerRow, ...]
    refused: tuple[RefusedCandidate, ...] = ()
    pareto_front: tuple[ParetoPlan, ...] = ()

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        name = self.strategy.name
        if self.accuracy == "bounded" and name != "tiled":
            raise ValueError(f"a {name} plan is exact, not bounded")
        if name == "streamed" and self.is_specialized:
            raise ValueError("a streamed network is not compiled or captured in a CUDA graph")
        return self

    def bytes_at(self, place: Place, *, upper: bool = False) -> int:
        """Return the ledger's sum at ``place``; on the CPU, host and device are one."""
        places = {"device", "host"} if self.device == "cpu" and place != "disk" else {place}
        total = 0
        for row in self.ledger:
            if row.place in places:
                total += row.upper if upper else row.value
        return total

    def with_strategy(self, **changes: Any) -> Plan:
        """Return the plan with other values of fields of its strategy."""
        return self.model_copy(update={"strategy": self.strategy.model_copy(update=changes)})

    @property
    def network_size(self) -> tuple[int, int]:
        """(height, width) of the network's input."""
        return self.strategy.network_size(self.image)

    @property
    def predicted_bytes(self) -> int:
        """Expected peak on the compute device."""
        return self.bytes_at("device")

    @property
    def upper_bytes(self) -> int:
        """Upper bound of the peak on the compute device."""
        return self.bytes_at("device", upper=True)

    @property
    def is_specialized(self) -> bool:
        """Whether the network is compiled or captured for the shape of its tiles."""
        return self.compiled or self.cuda_graph

    @property
    def title(self) -> str:
        """Summary for people: the strategy with its sizes."""
        more = ", compiled" if self.compiled else ", as a CUDA graph" if self.cuda_graph else ""
        more += ", freed memory returned at once" if self.heap == "trim" else ""
        return self.strategy.title(self.image) + more
