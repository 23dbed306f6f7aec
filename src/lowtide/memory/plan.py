"""Plan of one run as pure data: what runs, predicted memory, refused candidates."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from lowtide.core.option import Precision
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.memory.ledger import LedgerRow, Place
from lowtide.memory.strategy import ImageGeometry, Strategy

Accuracy = Literal["exact", "bounded"]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Refusal:
    """A candidate that was not chosen, and the reason in one line."""

    title: str
    reason: str


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Alternative:
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
    refused: tuple[Refusal, ...] = ()
    pareto_front: tuple[Alternative, ...] = ()

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
