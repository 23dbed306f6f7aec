"""Plans kept in files, to be run again as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.budget import Budget
from lowtide.memory.plan import Plan


@dataclass(frozen=True)
class PlanFile:
    """The plans of one file: a plan by itself, or those in a report, by the input's name."""

    path: Path
    plans: tuple[tuple[str, Plan], ...]

    @classmethod
    def read(cls, path: Path) -> PlanFile:
        """The plans in a JSON file made by ``plan --json`` or ``upscale --json`` or ``--report``.

        Raises `UsageError` for a file that holds none.
        """
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read as a plan: {error}") from None
        try:
            found = tuple((name, Plan.model_validate(plan)) for name, plan in _plans_in(data))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise UsageError(f"{path}: not a plan: {where}: {problem['msg'].lower()}") from None
        if not found:
            raise UsageError(
                f"{path}: holds no plan",
                hint="`lowtide plan upscale INPUT --json > plan.json` makes one",
            )
        return cls(path, found)

    def find(self, source: str, width: int, height: int) -> Plan:
        """The plan for an image: that of its name, else the one of its size.

        Raises `UsageError` where the file has none.
        """
        sized = [(name, p) for name, p in self.plans if (p.width, p.height) == (width, height)]
        named = [plan for name, plan in sized if Path(name).name == Path(source).name]
        if named or sized:
            return named[0] if named else sized[0][1]
        sizes = ", ".join(sorted({f"{plan.width}×{plan.height}" for _, plan in self.plans}))
        raise UsageError(
            f"{self.path}: has no plan for {source}, which is {width}×{height}",
            hint=f"its plans are for images of {sizes}",
        )


def check_replay(plan: Plan, expected: Mapping[str, Any], budget: Budget) -> Plan:
    """``plan`` with the budget it is held against now, if it suits this run.

    ``expected`` are fields and the values that this run needs them to have. Raises `UsageError`
    where one differs, `BudgetError` where the plan does not fit.
    """
    for name, value in expected.items():
        if (planned := getattr(plan, name)) != value:
            raise UsageError(
                f"the plan is for another run: its {name.replace('_', ' ')} is {planned},"
                f" that of this run {value}",
                hint="make the plan again, or give the options it was made with",
            )
    for place, limit in (("device", budget.device_bytes), ("host", budget.host_bytes)):
        need = plan.bytes_at(place, upper=True)  # pyright: ignore[reportArgumentType]
        if need > limit:
            raise BudgetError(
                f"the plan needs up to {format_bytes(need)} of {place} memory,"
                f" {format_bytes(limit)} are allowed",
                smallest=need,
                hint=f"--budget {-(-need // MIB)}MiB",
            )
    return plan.model_copy(
        update={
            "budget_bytes": budget.device_bytes,
            "host_budget_bytes": budget.host_bytes,
            "choice": f"{plan.title}: as the plan file says",
        }
    )


def _plans_in(data: Any) -> list[tuple[str, Any]]:
    if isinstance(data, dict) and "strategy" in data:
        return [("", data)]
    images = data.get("images", [data.get("image")]) if isinstance(data, dict) else []
    return [
        (str(image.get("input", "")), image["plan"])
        for image in images
        if isinstance(image, dict) and image.get("plan")
    ]
