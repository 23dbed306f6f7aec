"""Will it train in the memory there is, and what would make it fit? Nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from lowtide._version import __version__
from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.units import format_bytes, parse_bytes
from lowtide.jobs.train_settings import TrainSettings
from lowtide.jobs.user_models import UserModel, load_user_model
from lowtide.memory.budget import Budget
from lowtide.memory.profiles import DeviceProfile, load_profile, profile_for, profile_names
from lowtide.memory.training.fit_search import FitReport, fit_to_budget
from lowtide.memory.training.memory_plot import new_figure, plot_memory
from lowtide.memory.training.options import size_text

# What most image models divide their input by; smaller images are tried in multiples of it.
_MULTIPLE = 16


class TrainingPlan(BaseModel):
    """What a training step takes on one device, and the ladder that makes it fit.

    ``ladder.asked`` is the estimate of the step as asked, with its ledger. ``parameters`` are
    numbers, all others bytes.
    """

    schema_version: Literal[1] = 1
    lowtide: str = __version__
    torch: str = str(torch.__version__)
    model: str
    parameters: int
    device: str
    title: str
    budget_bytes: int
    ladder: FitReport

    @property
    def fits(self) -> bool:
        """Whether any rung fits the budget."""
        return self.ladder.chosen is not None

    def require(self) -> None:
        """Raise `BudgetError` naming the smallest rung if nothing fits."""
        self.ladder.require()

    def __str__(self) -> str:
        asked = self.ladder.asked
        ledger = ", ".join(
            f"{row.name} {format_bytes(row.value)}" for row in asked.ledger if row.value
        )
        rows = {
            "device": f"{self.title}, budget {format_bytes(self.budget_bytes)}",
            "step": str(self.ladder.rungs[0].settings),
            "memory": (
                f"expected {format_bytes(asked.predicted_bytes)}, at most"
                f" {format_bytes(asked.upper_bytes)}"
            ),
            "peak": (
                f"in {asked.phase}, at {asked.operator}; tensors alone take"
                f" {format_bytes(asked.live_bytes)}"
            ),
            "ledger": ledger,
        }
        lines = [f"{self.model}: {self.parameters:,} weights"]
        lines += [f"  {name:<10} {text}" for name, text in rows.items()]
        lines += [f"  {'note':<10} {note}" for note in asked.notes]
        return "\n".join([*lines, "", str(self.ladder)])


class DevicePlans(BaseModel):
    """The same training step on every card that there is a profile of."""

    schema_version: Literal[1] = 1
    plans: list[TrainingPlan]

    @property
    def fits(self) -> bool:
        """Whether it fits any of the cards."""
        return any(plan.fits for plan in self.plans)

    def require(self) -> None:
        """Raise `BudgetError` if it fits none of the cards."""
        if not self.fits:
            least = min(plan.ladder.smallest.upper_bytes or 0 for plan in self.plans)
            raise BudgetError(
                f"nothing fits any card: the smallest rung needs up to {format_bytes(least)}",
                smallest=least,
                hint="a smaller model",
            )

    def __str__(self) -> str:
        rows = [("device", "budget", "as asked", "at most", "first rung that fits")]
        for plan in self.plans:
            asked, choice = plan.ladder.asked, plan.ladder.choice
            rows.append(
                (
                    plan.device,
                    format_bytes(plan.budget_bytes),
                    format_bytes(asked.predicted_bytes),
                    format_bytes(asked.upper_bytes),
                    choice.name if choice else "none",
                )
            )
        widths = [max(len(row[at]) for row in rows) for at in range(4)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  "
            + "  ".join(f"{row[at]:>{widths[at]}}" for at in (1, 2, 3))
            + f"  {row[4]}"
            for row in rows
        )


def plan_training(
    model: Any,
    *,
    device: str | DeviceProfile = "auto",
    budget: str | int = "auto",
    strict: bool = False,
    full: bool = True,
    plot: str | Path | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> TrainingPlan:
    """What one training step of ``model`` takes, and what must change for it to fit.

    ``model`` is a module, a function that returns one, or its place, as in `load_user_model`.
    ``device`` is the name of a profile (``"rtx3070-8gb"``), which need not be here, ``"cpu"``,
    ``"cuda:0"``, or ``"auto"`` for the CUDA device of this machine. ``budget`` is
    ``"6GiB"``, ``"80%"``, bytes, or ``"auto"``: all that the card has but what the display
    usually takes. Further keywords are the fields of `TrainSettings`. ``plot`` is a picture of
    the step's memory to write. ``full`` and ``progress`` are as in `fit_to_budget`.

    Raises `UsageError`, `ModelError`, `OutputError`, and with ``strict`` `BudgetError` where
    nothing fits.
    """
    chosen = TrainSettings.of(**settings)
    profile = _profile(device)
    if plot is not None:
        new_figure(Path(plot))  # raises now what would be raised after a minute of tracing
    given = load_user_model(model)
    budget_bytes = _budget(budget, profile)
    plan = _plan(given, chosen, profile, budget_bytes, full, loss, progress)
    if plot is not None:
        plot_memory(
            plan.ladder.asked,
            plot,
            budget_bytes=budget_bytes,
            title=f"{given.name} on {profile.title}: {plan.ladder.rungs[0].settings}",
        )
    if strict:
        plan.require()
    return plan


def plan_training_on_all_gpus(
    model: Any,
    *,
    budget: str | int = "auto",
    loss: Callable[[Any], Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> DevicePlans:
    """`plan_training` for every card that there is a profile of, up to the first rung that fits."""
    chosen = TrainSettings.of(**settings)
    given = load_user_model(model)
    cards = [load_profile(name) for name in profile_names()]
    plans = []
    for card in cards:
        if card.kind == "cpu":
            continue
        if progress is not None:
            progress(card.name)
        budget_bytes = _budget(budget, card, capped=True)
        plans.append(_plan(given, chosen, card, budget_bytes, False, loss, None))
    return DevicePlans(plans=plans)


def _plan(
    given: UserModel,
    settings: TrainSettings,
    profile: DeviceProfile,
    budget_bytes: int,
    full: bool,
    loss: Callable[[Any], Tensor] | None,
    progress: Callable[[str], None] | None,
) -> TrainingPlan:
    _check_size(given, settings.size)
    if settings.validation_size is not None:
        _check_size(given, settings.validation_size)
    make_step = settings.make_step(given.module, profile.kind == "cuda", loss)
    ladder = fit_to_budget(
        given.module,
        make_step(settings.batch, settings.size),
        budget_bytes=budget_bytes,
        device=profile,
        make_step=make_step,
        batch=settings.batch,
        size=settings.size,
        multiple=given.multiple(_MULTIPLE),
        strict=False,
        full=full,
        progress=progress,
    )
    return TrainingPlan(
        model=given.name,
        parameters=sum(weight.numel() for weight in given.module.parameters()),
        device=profile.name,
        title=profile.title,
        budget_bytes=budget_bytes,
        ladder=ladder,
    )


def _check_size(given: UserModel, size: tuple[int, int]) -> None:
    rule = given.descriptor.size if given.descriptor else None
    if rule is None or rule.padding(*size) == (0, 0):
        return
    rows, columns = rule.padding(*size)
    fitting = size_text((size[0] + rows, size[1] + columns))
    raise UsageError(
        f"{given.name} does not take images of {size_text(size)}",
        hint=f"--size {fitting.replace('×', 'x')}",
    )


def _profile(device: str | DeviceProfile) -> DeviceProfile:
    if isinstance(device, DeviceProfile):
        return device
    if device == "auto":
        if not torch.cuda.is_available():
            cards = ", ".join(name for name in profile_names() if name != "cpu")
            raise UsageError(
                "this machine has no CUDA device: which one is to be trained on?",
                hint=f"--device cpu, or one of {cards}",
            )
        device = "cuda"
    return profile_for(device)


def _budget(text: str | int, profile: DeviceProfile, *, capped: bool = False) -> int:
    """Bytes of ``text`` on a device that may not be here; ``capped`` at all that it has."""
    if profile.kind == "cpu":
        return Budget.parse(text).device_bytes
    free = profile.total_bytes - profile.desktop_bytes
    words = str(text).strip().lower()
    if words == "auto":
        return free
    if words.endswith("%"):
        try:
            share = float(words[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UsageError(f"budget {text!r} is not a percentage from 1% to 100%")
        return int(profile.total_bytes * share)
    count = parse_bytes(words, what="budget")
    if count > profile.total_bytes and not capped:
        raise UsageError(
            f"budget {text!r} is more than {profile.title} has:"
            f" {format_bytes(profile.total_bytes)}",
            hint="auto, or 80% for a share of it",
        )
    return min(count, free) if capped else count
