"""Plan a training step: whether it fits the memory, and which changes make it fit.

Nothing is trained. The step is one of any module, or that of a training's configuration, which is
planned by what the training itself prepares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from lowtide.core.atomic_file import require_name, require_output
from lowtide.core.errors import UsageError
from lowtide.core.figure_file import require_figure_name
from lowtide.core.units import parse_bytes
from lowtide.jobs.engine.devices import resolve_device
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.train.memory import TrainTaskVariants, smallest_plan
from lowtide.jobs.train.plan_report import DeviceTrainingPlans, TrainingPlan
from lowtide.jobs.train.run import device_and_budget
from lowtide.jobs.train.settings import TrainKeywords, TrainSettings
from lowtide.jobs.train.user_models import UserModel, load_user_model
from lowtide.memory.budget import Budget
from lowtide.memory.profiles import DeviceProfile, find_profile, load_profile, profile_names
from lowtide.memory.training.fit_search import (
    TracesBySettings,
    find_fit,
    fit_to_budget,
)
from lowtide.memory.training.memory_plot import plot_memory
from lowtide.memory.training.options import size_text
from lowtide.training.distributed import ProcessGroup
from lowtide.training.run_config import RunConfig
from lowtide.training.task import TrainTask
from lowtide.training.traced_step import TaskModules

if TYPE_CHECKING:
    from torch import Tensor, nn

# A function that builds the task of a configuration, with the data of one process.
MakeTask = Callable[[Any, ProcessGroup], TrainTask]
_USUAL_SIZE = 256, 256
# Most image models need sides that are multiples of this; the ladder tries such sizes.
_MULTIPLE = 16


class PlannedStep(Protocol):
    """What is planned: a step of a module, or that of a training."""

    @property
    def name(self) -> str:
        """Name of the model or of the training."""
        ...

    def plan(
        self,
        profile: DeviceProfile,
        budget_bytes: int,
        *,
        full: bool = True,
        traces: TracesBySettings | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> TrainingPlan:
        """Return the plan for a device; ``full`` and what follows are as in `find_fit`."""
        ...


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
    step = PlannedModule(load_user_model(model), chosen, loss)
    budget_bytes = _budget(chosen.budget, profile)
    return _plan(step, profile, budget_bytes, full, plot, force, progress)


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
    step = PlannedModule(load_user_model(model), chosen, loss)
    return _plan_on_all_gpus(step, lambda card: _budget(chosen.budget, card, capped=True), progress)


def plan_run(
    config: RunConfig,
    make_task: MakeTask,
    *,
    device: str = TrainSettings.device,
    budget: str | int = TrainSettings.budget,
    full: bool = True,
    plot: str | Path | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TrainingPlan:
    """Predict the memory of a training's step and what makes it fit, by what it prepares itself.

    The step requested is split as the training would split it.

    Args:
        config: The training's configuration.
        make_task: Builds its task with the data of one process, as `make_sr_task` does.
        device: As of `run_training`, or a GPU that need not be present.
        budget: As of `run_training`.
        full: As in `fit_to_budget`, and so is ``progress``.
        plot: File to draw the step's memory to.
        force: Replace it if it exists.

    Raises:
        BudgetError: The batch alone takes more than the budget. Others are those of the training.
    """
    processes = ProcessGroup.from_environment()
    device, budget_bytes = device_and_budget(device, budget, processes)
    step = PlannedRun(config, make_task(config, processes))
    return _plan(step, find_profile(device), budget_bytes, full, plot, force, progress)


def plan_run_on_all_gpus(
    config: RunConfig,
    make_task: MakeTask,
    *,
    budget: str | int = TrainSettings.budget,
    progress: Callable[[str], None] | None = None,
) -> DeviceTrainingPlans:
    """Run `plan_run` for every GPU profile, up to the first option that fits."""

    def budget_of(card: DeviceProfile) -> int:
        if budget == "auto":
            return Budget.for_profile(card).device_bytes
        return _budget(budget, card, capped=True)

    step = PlannedRun(config, make_task(config, ProcessGroup.from_environment()))
    return _plan_on_all_gpus(step, budget_of, progress)


def _plan(
    step: PlannedStep,
    profile: DeviceProfile,
    budget_bytes: int,
    full: bool,
    plot: str | Path | None,
    force: bool,
    progress: Callable[[str], None] | None,
) -> TrainingPlan:
    if plot is not None:
        require_name(plot)  # fail before a minute of tracing
        require_figure_name(Path(plot))
        require_output(Path(plot), force=force)
    plan = step.plan(profile, budget_bytes, full=full, progress=progress)
    if plot is not None:
        plot_memory(
            plan.fit_report.requested,
            plot,
            budget_bytes=plan.budget_bytes,
            replace=force,
            title=f"{step.name} on {profile.title}: {plan.fit_report.options[0].settings}",
        )
    return plan


def _plan_on_all_gpus(
    step: PlannedStep,
    budget_of: Callable[[DeviceProfile], int],
    progress: Callable[[str], None] | None,
) -> DeviceTrainingPlans:
    """Plan a step for every GPU profile; it is traced once for those that run it alike."""
    traces: TracesBySettings = defaultdict(list)
    plans = []
    for card in map(load_profile, profile_names()):
        if card.kind == "cpu":
            continue
        if progress is not None:
            progress(card.name)
        plans.append(step.plan(card, budget_of(card), full=False, traces=traces))
    return DeviceTrainingPlans(plans=plans)


def _plan_facts(
    name: str, networks: nn.Module, profile: DeviceProfile, budget_bytes: int
) -> dict[str, Any]:
    """Return the fields of a `TrainingPlan` that are the same whatever is planned."""
    return {
        "model": name,
        "parameters": sum(weight.numel() for weight in networks.parameters()),
        "device": profile.name,
        "device_title": profile.title,
        "budget_bytes": budget_bytes,
    }


@dataclass(frozen=True)
class PlannedModule:
    """A step of a module, as `PlannedStep`."""

    model: UserModel
    settings: TrainSettings
    loss: Callable[[Any], Tensor] | None = None

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    def plan(
        self,
        profile: DeviceProfile,
        budget_bytes: int,
        *,
        full: bool = True,
        traces: TracesBySettings | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> TrainingPlan:
        """Return the plan for a device."""
        settings, module, facts = self.settings, self.model.module, self.model.descriptor
        size = settings.size or _USUAL_SIZE
        for sides in filter(None, (size, settings.validation_size)):
            _check_size(self.model, sides)
        if facts is not None and not settings.inputs and settings.channels is None:
            settings = replace(settings, channels=facts.in_channels)
        make_step = settings.make_step(module, size, profile.kind == "cuda", self.loss)
        fit_report = fit_to_budget(
            module,
            make_step(settings.batch, size),
            budget_bytes=budget_bytes,
            device=profile,
            make_step=make_step,
            batch=settings.batch,
            size=size,
            multiple=self.model.size_multiple(_MULTIPLE),
            full=full,
            progress=progress,
            traces=traces,
        )
        return TrainingPlan(
            **_plan_facts(self.name, module, profile, budget_bytes), fit_report=fit_report
        )


@dataclass(frozen=True)
class PlannedRun:
    """The step of a training as its configuration has it, as `PlannedStep`.

    ``task`` is what the training itself prepares, and its step is split as it would be.
    """

    config: RunConfig
    task: TrainTask

    @property
    def name(self) -> str:
        """The training's name."""
        return self.config.name

    def plan(
        self,
        profile: DeviceProfile,
        budget_bytes: int,
        *,
        full: bool = True,
        traces: TracesBySettings | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> TrainingPlan:
        """Return the plan for a device; raises `BudgetError` where the batch alone is too large."""
        config, task = self.config, self.task
        shared: TracesBySettings = defaultdict(list) if traces is None else traces
        training = smallest_plan(config, task, budget_bytes, profile, shared)
        variants = TrainTaskVariants(
            config,
            task,
            TaskModules(config, task),
            profile.kind != "cpu",
            training.micro_batches,
            training.heap,
        )
        return TrainingPlan(
            **_plan_facts(self.name, variants.modules.networks, profile, budget_bytes),
            training=training,
            steps=config.train.total_iter,
            notes=[note for one in task.networks.values() for note in getattr(one, "notes", ())],
            fit_report=find_fit(
                variants, profile, budget_bytes, full=full, traces=shared, progress=progress
            ),
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
