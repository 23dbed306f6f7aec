"""What a model takes: as shipped with it, as stored on this machine, or measured now."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide.core.heap import heap_is_tuned
from lowtide.core.option import Precision
from lowtide.core.progress import Cancel
from lowtide.jobs.images.run_clock import with_clock_ratio
from lowtide.memory.costs import ModelCosts
from lowtide.memory.plan_store import JsonCache, machine_facts
from lowtide.streaming.planner.model_facts import ModelGeometry
from lowtide.streaming.probe.measure_costs import (
    known_costs,
    probe_costs,
    trace_band_costs,
    trace_whole_costs,
)
from lowtide.streaming.tiles.network import RunnableNetwork


@dataclass(frozen=True)
class ModelCostFinder:
    """Finds or measures the costs of one network.

    ``identity`` is its hash, and the version of the runtime where that is not PyTorch.
    ``on_measuring`` is called before anything is measured.
    """

    network: RunnableNetwork
    sha256: str
    identity: str
    geometry: ModelGeometry
    weight_bytes: Callable[[], int]
    on_measuring: Callable[[], None]

    def known(self, limit_bytes: int | None) -> ModelCosts | None:
        """Return all costs as this machine measured them, or as shipped; None where neither is.

        Those that a limit cut short hold for limits like ``limit_bytes``.
        """
        found = self._stored() or self._stored(_rounded(limit_bytes))
        found = found or shipped_costs(self.network, self.sha256)
        return None if found is None else with_clock_ratio(found)

    def measured(self, limit_bytes: int | None, cancel: Cancel = None) -> ModelCosts:
        """Measure all costs within ``limit_bytes``, and put them into the cache."""
        limit_bytes = _rounded(limit_bytes)
        self.on_measuring()
        costs, complete = probe_costs(
            self.network,
            sha256=self.sha256,
            weight_bytes=self.weight_bytes(),
            align=self.geometry.align,
            minimum=self.geometry.minimum,
            limit_bytes=limit_bytes,
            cancel=cancel,
        )
        store_costs(costs, self.identity, None if complete else limit_bytes)
        return with_clock_ratio(costs)

    def of_whole(self, size: tuple[int, int], limit_bytes: int) -> ModelCosts | None:
        """Return the costs of a run on a whole image of ``size`` (H, W), from the cache or a trace.

        Smaller images than one that was traced need no trace of their own. None for a network that
        cannot be traced.
        """

        def is_known(costs: ModelCosts) -> bool:
            return costs.traced_points[-1].pixels >= math.prod(size)

        return self._traced("whole", trace_whole_costs, size, limit_bytes, is_known)

    def of_bands(self, pixels: int, limit_bytes: int | None) -> ModelCosts | None:
        """Return the costs of bands of an image of ``pixels``, from the cache or traces.

        They are the same as of `measured` costs, which say more: about tiles, and larger images.
        None for a network that cannot be traced.
        """
        limit_bytes, up_to = _rounded(limit_bytes), 1 << (pixels - 1).bit_length()
        part = f"bands of {up_to} pixels, {limit_bytes}"
        return self._traced(part, trace_band_costs, up_to, limit_bytes, lambda _costs: True)

    def _traced(
        self,
        part: str,
        trace: Callable[..., ModelCosts | None],
        run: object,
        limit_bytes: int | None,
        is_known: Callable[[ModelCosts], bool],
    ) -> ModelCosts | None:
        """Return the costs that ``trace`` finds for ``run``, or those of the cache."""
        costs = self._stored(part)
        if costs is None or not is_known(costs):
            self.on_measuring()
            costs = trace(
                self.network,
                run,
                sha256=self.sha256,
                weight_bytes=self.weight_bytes(),
                align=self.geometry.align,
                minimum=self.geometry.minimum,
                limit_bytes=limit_bytes,
            )
            if costs is None:
                return None
            store_costs(costs, self.identity, part)
        return with_clock_ratio(costs)

    def _stored(self, part: int | str | None = None) -> ModelCosts | None:
        network = self.network
        return stored_costs(self.identity, network.device, network.precision, part)


def stored_costs(
    identity: str, device: str, precision: Precision, part: int | str | None = None
) -> ModelCosts | None:
    """Return the costs of a network as they were measured on this machine, or None.

    Costs of which only a ``part`` is known have an entry of their own: those whose measurement a
    limit cut short, by its bytes, and those of whole images or bands, by a word.
    """
    facts = _cost_facts(identity, device, precision, part)
    found = JsonCache().get("costs", *facts)
    return None if found is None else ModelCosts.model_validate(found)


def store_costs(costs: ModelCosts, identity: str, part: int | str | None = None) -> None:
    """Store costs for `stored_costs`."""
    facts = _cost_facts(identity, costs.device, costs.precision, part)
    JsonCache().put("costs", *facts, value=costs.model_dump(mode="json"))


def _cost_facts(
    identity: str, device: str, precision: Precision, part: int | str | None
) -> tuple[object, ...]:
    return identity, precision, part, heap_is_tuned(), *machine_facts(device)


def _rounded(limit_bytes: int | None) -> int | None:
    """Return the power of two below a limit, so that similar limits share an entry."""
    return None if limit_bytes is None else 1 << (limit_bytes.bit_length() - 1)


def shipped_costs(network: RunnableNetwork, sha256: str) -> ModelCosts | None:
    """Return the costs that ship with a bundled model, in fp32 on the CPU; None for others.

    They are what traces and comparisons find on any machine; no time is among them.
    """
    shipped = _shipped().get(sha256)
    if shipped is None or (network.device, network.precision) != ("cpu", "fp32"):
        return None
    return ModelCosts(**{**known_costs(network, sha256, 0), **shipped})


@functools.cache
def _shipped() -> dict[str, dict[str, Any]]:
    file = importlib.resources.files("lowtide.memory") / "data" / "bundled_costs.json"
    return json.loads(file.read_text())
