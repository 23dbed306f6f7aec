"""What a model takes: as shipped with it, as stored on this machine, or measured now."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import BudgetError
from lowtide.core.heap import heap_is_tuned
from lowtide.core.precision import Precision
from lowtide.core.progress import Cancel
from lowtide.jobs.engine.item import Item
from lowtide.media import ImageFacts
from lowtide.media.discover import IMAGES, FilePair
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts
from lowtide.memory.measurement.cpu_half_precision import expected_slowdown
from lowtide.memory.plan import Plan
from lowtide.memory.plan_store import PlanStore, machine
from lowtide.models import SizeRule
from lowtide.streaming.planner.model_facts import ModelGeometry
from lowtide.streaming.probe.measure_costs import (
    known_costs,
    probe_costs,
    trace_bands,
    trace_whole,
)
from lowtide.streaming.tiles.tile_step import NetworkSpec

if TYPE_CHECKING:
    from lowtide.jobs.images.job import ImageJob
    from lowtide.jobs.images.prepared import PreparedModel
    from lowtide.jobs.images.settings import ImageSettings

# Seconds of a run below which files and Python take most of its time.
_LEAST_SECONDS = 0.1
# The receptive field takes 20 runs on 64×64 pixels, or 20 more on nine times that. A larger image
# repays it where tiles turn out to be faster, and takes less memory in them anyway.
_MAX_PIXELS = 1 << 20


@dataclass(frozen=True)
class CostLookup:
    """Finds or measures the costs of one network.

    ``identity`` is its hash, and the version of the runtime where that is not PyTorch.
    ``on_measuring`` is called before anything is measured.
    """

    network: NetworkSpec
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
        return None if found is None else _with_clock_ratio(found)

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
        return _with_clock_ratio(costs)

    def of_whole(self, size: tuple[int, int], limit_bytes: int) -> ModelCosts | None:
        """Return the costs of a run on a whole image of ``size`` (H, W), from the cache or a trace.

        Smaller images than one that was traced need no trace of their own. None for a network that
        cannot be traced.
        """

        def is_known(costs: ModelCosts) -> bool:
            return costs.traced_points[-1].pixels >= math.prod(size)

        return self._traced("whole", trace_whole, size, limit_bytes, is_known)

    def of_bands(self, pixels: int, limit_bytes: int | None) -> ModelCosts | None:
        """Return the costs of bands of an image of ``pixels``, from the cache or traces.

        They are the same as of `measured` costs, which say more: about tiles, and larger images.
        None for a network that cannot be traced.
        """
        limit_bytes, up_to = _rounded(limit_bytes), 1 << (pixels - 1).bit_length()
        part = f"bands of {up_to} pixels, {limit_bytes}"
        return self._traced(part, trace_bands, up_to, limit_bytes, lambda _costs: True)

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
        return _with_clock_ratio(costs)

    def _stored(self, part: int | str | None = None) -> ModelCosts | None:
        network = self.network
        return stored_costs(self.identity, network.device, network.precision, part)


@dataclass(frozen=True)
class WholeImage:
    """The only image of a job, of ``size`` (H, W) without padding."""

    job_type: type[ImageJob]
    settings: ImageSettings
    budget: Budget
    item: Item
    size: tuple[int, int]

    def padded_size(self, rule: SizeRule) -> tuple[int, int]:
        """Return (H, W) of the image padded by the model's size rule."""
        rows, columns = rule.padding(*self.size)
        return self.size[0] + rows, self.size[1] + columns

    def traced_costs(
        self, lookup: CostLookup, rule: SizeRule, limit_bytes: int | None
    ) -> ModelCosts | None:
        """Return what traces say of a run of the image, whole or in bands, from the cache or now.

        ``rule`` is that of the model's sizes. None for a network that cannot be traced.
        """
        size = self.padded_size(rule)
        if self.settings.overrides.only_bands:
            return lookup.of_bands(math.prod(size), limit_bytes)
        return lookup.of_whole(size, self.budget.device_bytes // 2)

    def fits(self, prepared: PreparedModel) -> bool:
        """Return whether half of the budget is enough for a run on the whole image.

        ``prepared`` is the model with its `traced_costs`, which is all that bands need.
        """
        if self.settings.overrides.only_bands:
            return True
        half = replace(
            self.budget,
            device_bytes=self.budget.device_bytes // 2,
            host_bytes=self.budget.host_bytes // 2,
        )
        try:
            self.job_type(prepared, self.settings, half).plan_run(self.item)
        except BudgetError:
            return False
        return True


def whole_image(
    job_type: type[ImageJob],
    settings: ImageSettings,
    budget: Budget,
    pairs: Sequence[FilePair],
    facts: ImageFacts | None,
) -> WholeImage | None:
    """Return the only image of a job, or None where tiles may be needed.

    So where there are several images, or one of more than a million pixels, and where the settings
    ask for tiles, for a device other than the CPU, for less than fp32 or for a plan of
    earlier. ``facts`` are the header of the first input, if it was read.
    """
    plain = (
        settings.strategy in ("auto", "whole", "streamed")
        and settings.precision in ("auto", "fp32")
        and settings.compile != "on"
        and settings.plan_file is None
        and not settings.overrides.requires_tiles
    )
    if not plain or budget.device != "cpu" or len(pairs) != 1 or job_type.media_kind is not IMAGES:
        return None
    pair = pairs[0]
    info = (facts or job_type.inspect(pair.source, settings)).info
    if info.pixels > _MAX_PIXELS:
        return None
    item = Item(pair.source, pair.target)
    return WholeImage(job_type, settings, budget, item, (info.height, info.width))


def stored_costs(
    identity: str, device: str, precision: Precision, part: int | str | None = None
) -> ModelCosts | None:
    """Return the costs of a network as they were measured on this machine, or None.

    Costs of which only a ``part`` is known have an entry of their own: those whose measurement a
    limit cut short, by its bytes, and those of whole images or bands, by a word.
    """
    facts = _cost_facts(identity, device, precision, part)
    found = PlanStore().get("costs", *facts)
    return None if found is None else ModelCosts.model_validate(found)


def store_costs(costs: ModelCosts, identity: str, part: int | str | None = None) -> None:
    """Store costs for `stored_costs`."""
    facts = _cost_facts(identity, costs.device, costs.precision, part)
    PlanStore().put("costs", *facts, value=costs.model_dump(mode="json"))


def _cost_facts(
    identity: str, device: str, precision: Precision, part: int | str | None
) -> tuple[object, ...]:
    return identity, precision, part, heap_is_tuned(), *machine(device)


def _rounded(limit_bytes: int | None) -> int | None:
    """Return the power of two below a limit, so that similar limits share an entry."""
    return None if limit_bytes is None else 1 << (limit_bytes.bit_length() - 1)


def shipped_costs(network: NetworkSpec, sha256: str) -> ModelCosts | None:
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


@contextlib.contextmanager
def timed_in_passing(costs: ModelCosts, plan: Plan) -> Iterator[None]:
    """Keep how long a run of ``plan`` takes beside what its work was predicted to take.

    Only for a model that was not timed before it ran. The longest run of a model counts.
    """
    started = time.process_time()
    yield
    seconds = (time.process_time() - started) / costs.threads
    if costs.points or seconds < _LEAST_SECONDS:
        return
    facts = _clock_facts(costs)
    known = PlanStore().get("clock", *facts)
    if known is None or seconds > 2 * known["seconds"]:
        ratio = costs.clock_ratio * seconds / plan.seconds
        PlanStore().put("clock", *facts, value={"ratio": ratio, "seconds": seconds})


def _with_clock_ratio(costs: ModelCosts) -> ModelCosts:
    """Return costs whose seconds are those of this machine, as far as it ran the model before."""
    if costs.points:
        return costs
    known = PlanStore().get("clock", *_clock_facts(costs))
    ratio = expected_slowdown(costs.precision) if known is None else known["ratio"]
    return costs.model_copy(update={"clock_ratio": ratio})


def _clock_facts(costs: ModelCosts) -> tuple[object, ...]:
    return costs.sha256, costs.precision, *machine()
