"""Cache of strategies chosen after streaming was considered.

Considering it takes a quarter of a minute for a deep model, which each later image would wait for
again."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.jobs.prepared import PreparedModel
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest, shortfall
from lowtide.memory.plan import Plan
from lowtide.memory.plan_store import StoredTable, machine
from lowtide.streaming.planner.model_facts import ImageTask


class StrategyCache:
    """Strategy chosen instead of streaming, for one model and image size.

    Keyed by accuracy too, and by the budget to a factor of two. Holds for this machine, from the
    next time that the model is prepared: until then a plan does not depend on those before it.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        image_task: ImageTask,
        budget: Budget,
        accuracy: AccuracyRequest,
    ) -> None:
        self._store = StoredTable("bands", "passed over", *machine(prepared.costs.device))
        height, width = image_task.padded_size
        self._key = " ".join(
            map(
                str,
                (
                    prepared.costs.sha256,
                    prepared.precision,
                    height,
                    width,
                    image_task.shape[-1],
                    accuracy,
                    budget.device_bytes.bit_length(),
                ),
            )
        )
        self._budget, self._chosen_before = budget, prepared.chosen_before

    def get(self, plans: Sequence[Plan]) -> str | None:
        """Return the title of the cached choice if it is among ``plans`` and fits now."""
        if self._key not in self._chosen_before:
            self._chosen_before[self._key] = self._store.get(self._key)
        known = self._chosen_before[self._key]
        fitting = {plan.title for plan in plans if shortfall(plan, self._budget) is None}
        return known if known in fitting else None

    @property
    def is_known(self) -> bool:
        """Whether this machine has planned bands for such an image before."""
        return self._store.get(self._key) is not None

    def put(self, chosen: Plan | None) -> None:
        """Store the choice, of whatever strategy; None where no plan in bands was found."""
        self._store.put(self._key, "none" if chosen is None else chosen.title)
        self._store.save()
