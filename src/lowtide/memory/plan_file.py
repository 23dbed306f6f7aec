"""Plan files: plans saved as JSON, to be replayed unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.input_file import require_input
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.budget import Budget
from lowtide.memory.plan import Plan

_MAKE_ONE = "make it anew: lowtide plan upscale INPUT --json > plan.json"


@dataclass(frozen=True)
class PlanFile:
    """The plans of one JSON file: a single plan, or those of a report by input name."""

    path: Path
    plans: tuple[tuple[str, Plan], ...]

    @classmethod
    def read(cls, path: Path) -> PlanFile:
        """Read a JSON file made by ``plan --json``, ``upscale --json`` or ``--report``.

        Raises:
            UsageError: for a file that cannot be read or holds no plan.
        """
        require_input(path, UsageError, hint=_MAKE_ONE)
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: could not be read as a plan: {error}") from None
        try:
            found = tuple((name, _plan_of(plan, path)) for name, plan in _plans_in(data))
        except ValidationError as error:
            problem = error.errors()[0]
            what = problem["msg"].removeprefix("Value error, ")
            where = ".".join(map(str, problem["loc"]))
            if problem["type"] == "literal_error":  # a plan of another version
                what += f", not {problem['input']!r}"
            parts = f"{path}: not a plan", where, what[:1].lower() + what[1:]
            raise UsageError(": ".join(filter(None, parts)), hint=_MAKE_ONE) from None
        if not found:
            raise UsageError(f"{path}: contains no plan", hint=_MAKE_ONE)
        return cls(path, found)

    @property
    def first(self) -> Plan:
        """The first plan, which says how the model of all is prepared."""
        return self.plans[0][1]

    def find(self, source: str, width: int, height: int) -> Plan:
        """Return the plan for an image: that of its name and size, else of its size.

        Raises:
            UsageError: if the file has none.
        """
        plans = [(name, plan, plan.image) for name, plan in self.plans]
        sized = [(n, p) for n, p, image in plans if (image.width, image.height) == (width, height)]
        named = [plan for name, plan in sized if Path(name).name == Path(source).name]
        if named or sized:
            return named[0] if named else sized[0][1]
        sizes = ", ".join(sorted({f"{image.width}×{image.height}" for *_, image in plans}))
        raise UsageError(
            f"{self.path}: has no plan for {source}, which is {width}×{height}",
            hint=f"its plans are for images of {sizes}",
        )


def plan_for_replay(plan: Plan, expected: Mapping[str, Any], budget: Budget) -> Plan:
    """Return ``plan`` with the current budget, after checking that it suits this run.

    Args:
        expected: names of fields of the plan or its image, and the values that this run needs.

    Raises:
        UsageError: if a field differs.
        BudgetError: if the plan does not fit the budget.
    """
    fields = dict(plan.image) | dict(plan)
    for name, value in expected.items():
        if (planned := fields[name]) != value:
            raise UsageError(
                f"the plan is for a different run: its {name.replace('_', ' ')} is {planned},"
                f" but this run has {value}",
                hint="plan again, or use the options that the plan was made with",
            )
    for place, limit in (("device", budget.device_bytes), ("host", budget.host_bytes)):
        need = plan.bytes_at(place, upper=True)  # pyright: ignore[reportArgumentType]
        if need > limit:
            raise BudgetError(
                f"the plan needs up to {format_bytes(need)} of {place} memory,"
                f" but only {format_bytes(limit)} is allowed",
                smallest=need,
                hint=f"--budget {-(-need // MIB)}MiB",
            )
    return plan.model_copy(
        update={
            "budget_bytes": budget.device_bytes,
            "host_budget_bytes": budget.host_bytes,
            "choice": f"{plan.title}: taken from the plan file",
        }
    )


def _plan_of(data: Any, path: Path) -> Plan:
    """Validate one plan; its other names would be read as defaults if it is of another schema."""
    schema = data.get("schema_version", data.get("version", 1)) if isinstance(data, dict) else None
    if schema is not None and schema != SCHEMA_VERSION:
        raise UsageError(
            f"{path}: a plan of schema {schema}, made by another version of Lowtide; this one reads"
            f" schema {SCHEMA_VERSION}",
            hint=_MAKE_ONE,
        )
    return Plan.model_validate(data)


def _plans_in(data: Any) -> list[tuple[str, Any]]:
    if isinstance(data, dict) and "strategy" in data:
        return [("", data)]
    images = data.get("images", [data.get("image")]) if isinstance(data, dict) else []
    if not isinstance(images, list):
        return []
    return [
        (str(image.get("input", "")), image["plan"])
        for image in images
        if isinstance(image, dict) and image.get("plan")
    ]
