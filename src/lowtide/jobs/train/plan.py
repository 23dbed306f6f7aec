"""Plan a training step: whether it fits the memory, and which changes make it fit.

Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pydantic import BaseModel, Field

from lowtide._version import __version__
from lowtide.core.atomic_file import require_name, require_output
from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.figure_file import require_figure_name
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes, parse_bytes
from lowtide.jobs.engine.devices import resolve_device
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.train.settings import TrainKeywords, TrainSettings
from lowtide.jobs.train.user_models import UserModel, load_user_model
from lowtide.memory.budget import Budget
from lowtide.memory.profiles import DeviceProfile, find_profile, load_profile, profile_names
from lowtide.memory.training.fit_search import FitReport, fit_to_budget
from lowtide.memory.training.memory_plot import plot_memory
from lowtide.memory.training.options import size_text

if TYPE_CHECKING:
    from torch import Tensor

# Most image models need sides that are multiples of this; the ladder tries such sizes.
_MULTIPLE = 16


class TrainingPlan(BaseModel):
    """Predicted memory of a training step on one device, and changes that make it fit.

    ``fit_report.requested`` is the estimate of the step as requested, with its ledger.
    ``parameters`` is a count, all other sizes are bytes.
    """

    schema_version: int = SCHEMA_VERSION
    lowtide: str = __version__
    torch: str = Field(default_factory=partial(version, "torch"))
    model: str
    parameters: int
    device: str
    device_title: str
    budget_bytes: int
    fit_report: FitReport

    @property
    def fits(self) -> bool:
        """Return whether any option fits the budget."""
        return self.fit_report.chosen is not None

    def require(self) -> None:
        """Raise `BudgetError` that names the smallest option if none fits."""
        self.fit_report.require()

    def __str__(self) -> str:
        asked = self.fit_report.requested
        ledger = ", ".join(
            f"{row.name} {format_bytes(row.value)}" for row in asked.ledger if row.value
        )
        memory, most, tensors, budget = map(
            format_bytes,
            (asked.predicted_bytes, asked.upper_bytes, asked.live_bytes, self.budget_bytes),
        )
        lines = [
            f"{self.model}: {self.parameters:,} parameters",
            f"  device     {self.device_title}, budget {budget}",
            f"  step       {self.fit_report.options[0].settings}",
            f"  memory     expected {memory}, at most {most}",
            f"  peak       in {asked.phase}, at {asked.operator}; tensors alone take {tensors}",
            f"  ledger     {ledger}",
            *(f"  note       {note}" for note in asked.notes),
        ]
        return "\n".join([*lines, "", str(self.fit_report)])


class DeviceTrainingPlans(BaseModel):
    """Plans of the same training step for every GPU that has a device profile."""

    schema_version: int = SCHEMA_VERSION
    plans: list[TrainingPlan]

    @property
    def fits(self) -> bool:
        """Return whether the step fits any of the GPUs."""
        return any(plan.fits for plan in self.plans)

    def require(self) -> None:
        """Raise `BudgetError` if the step fits none of the GPUs."""
        if not self.fits:
            smallest = min(plan.fit_report.smallest.upper_bytes or 0 for plan in self.plans)
            raise BudgetError(
                f"nothing fits any GPU: the smallest option needs up to {format_bytes(smallest)}",
                smallest=smallest,
                hint="a smaller model",
            )

    def __str__(self) -> str:
        lines = ["device            budget  requested   at most  first option that fits"]
        for plan in self.plans:
            asked, choice = plan.fit_report.requested, plan.fit_report.choice
            budget, expected, most = map(
                format_bytes, (plan.budget_bytes, asked.predicted_bytes, asked.upper_bytes)
            )
            lines.append(
                f"{plan.device:<14}  {budget:>8}  {expected:>9}  {most:>8}"
                f"  {choice.name if choice else 'none'}"
            )
        return "\n".join(lines)


@show_keywords(TrainSettings, TrainKeywords)
def plan_training(
    model: Any,
    *,
    device: str | DeviceProfile = TrainSettings.device,
    full: bool = True,
    plot: str | Path | None = None,
    force: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Unpack[TrainKeywords],
) -> TrainingPlan:
    """Predict the memory of a training step of ``model`` and what makes it fit.

    Args:
        model: A module, a function that returns one, or its place, as in `load_user_model`.
        device: Name of a device profile (``"rtx3070-8gb"``), which need not be present, ``"cpu"``,
            ``"cuda:0"``, or ``"auto"`` for the CUDA device of this machine.
        full: As in `fit_to_budget`, and so is ``progress``.
        plot: File to draw the step's memory to.
        force: Replace it if it exists.
        loss: Maps the model's output to a scalar; by default the mean square of its elements.
        settings: Step and budget, as fields of `TrainSettings`.

    Raises:
        UsageError: An argument is invalid.
        ModelError: The model cannot be loaded or traced.
        OutputError: ``plot`` cannot be written.
    """
    chosen = TrainSettings.of(**settings)
    profile = _profile(device)
    if plot is not None:
        require_name(plot)  # fail before a minute of tracing
        require_figure_name(Path(plot))
        require_output(Path(plot), force=force)
    user_model = load_user_model(model)
    budget_bytes = _budget(chosen.budget, profile)
    plan = _plan(user_model, chosen, profile, budget_bytes, full, loss, progress)
    if plot is not None:
        plot_memory(
            plan.fit_report.requested,
            plot,
            budget_bytes=budget_bytes,
            replace=force,
            title=f"{user_model.name} on {profile.title}: {plan.fit_report.options[0].settings}",
        )
    return plan


@show_keywords(TrainSettings, TrainKeywords)
def plan_training_on_all_gpus(
    model: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Unpack[TrainKeywords],
) -> DeviceTrainingPlans:
    """Run `plan_training` for every GPU profile, up to the first option that fits.

    ``loss`` maps the model's output to a scalar; by default the mean square of its elements.
    """
    chosen = TrainSettings.of(**settings)
    user_model = load_user_model(model)
    profiles = [load_profile(name) for name in profile_names()]
    plans = []
    for card in profiles:
        if card.kind == "cpu":
            continue
        if progress is not None:
            progress(card.name)
        budget_bytes = _budget(chosen.budget, card, capped=True)
        plans.append(_plan(user_model, chosen, card, budget_bytes, False, loss, None))
    return DeviceTrainingPlans(plans=plans)


def _plan(
    user_model: UserModel,
    settings: TrainSettings,
    profile: DeviceProfile,
    budget_bytes: int,
    full: bool,
    loss: Callable[[Any], Tensor] | None,
    progress: Callable[[str], None] | None,
) -> TrainingPlan:
    size = settings.size or user_model.size
    _check_size(user_model, size)
    if settings.validation_size is not None:
        _check_size(user_model, settings.validation_size)
    module = user_model.of_size(size)
    facts = user_model.descriptor
    if facts is not None and not settings.inputs and settings.channels is None:
        settings = replace(settings, channels=facts.in_channels)
    make_step = settings.make_step(user_model.of_size, size, profile.kind == "cuda", loss)
    fit_report = fit_to_budget(
        module,
        make_step(settings.batch, size),
        budget_bytes=budget_bytes,
        device=profile,
        make_step=make_step,
        batch=settings.batch,
        size=size,
        resize=user_model.resize,
        multiple=user_model.size_multiple(_MULTIPLE),
        full=full,
        progress=progress,
    )
    return TrainingPlan(
        model=user_model.name,
        parameters=sum(weight.numel() for weight in module.parameters()),
        device=profile.name,
        device_title=profile.title,
        budget_bytes=budget_bytes,
        fit_report=fit_report,
    )


def _check_size(user_model: UserModel, size: tuple[int, int]) -> None:
    rule = user_model.descriptor.size if user_model.descriptor else None
    if rule is None or rule.padding(*size) == (0, 0):
        return
    rows, columns = rule.padding(*size)
    fitting = size_text((size[0] + rows, size[1] + columns))
    raise UsageError(
        f"{user_model.name} does not accept images of {size_text(size)}",
        hint=f"--size {fitting.replace('×', 'x')}",
    )


def _profile(device: str | DeviceProfile) -> DeviceProfile:
    if isinstance(device, DeviceProfile):
        return device
    if device == "auto":
        if resolve_device("auto") == "cpu":
            gpus = ", ".join(name for name in profile_names() if name != "cpu")
            raise UsageError(
                "this machine has no CUDA device, and no other is named to plan for",
                hint=f"--device cpu, or one of {gpus}",
            )
        device = "cuda"
    return find_profile(device)


def _budget(text: str | int, profile: DeviceProfile, *, capped: bool = False) -> int:
    """Return the bytes of ``text`` on a device that may be absent.

    ``capped`` limits them to what a display leaves of the device.
    """
    if profile.kind == "cpu":
        return Budget.parse(text).device_bytes
    free = profile.total_bytes - profile.desktop_bytes
    words = str(text).strip().lower()
    if words == "auto":
        return free
    if capped and not words.endswith("%"):
        return min(parse_bytes(words, what="budget"), free)
    return Budget.for_profile(profile, words).device_bytes
