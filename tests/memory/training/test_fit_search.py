"""What a change frees is what two traces differ by; the first that fits; what does not apply."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from lowtide import BudgetError, ModelError, UsageError
from lowtide.core.units import format_bytes
from lowtide.memory.prediction.estimate import traced_estimate
from lowtide.memory.profiles import load_profile
from lowtide.memory.tracing.steps import TrainingStep
from lowtide.memory.training.fit_search import FitOption, FitReport, fit_to_budget
from lowtide.memory.training.options import StepMemorySettings, change_settings

GPU = load_profile("rtx3060-12gb")
TOP = GPU.total_bytes


class Net(nn.Module):
    """Two blocks of convolutions at one resolution."""

    def __init__(self, norm: type[nn.Module] = nn.Identity, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(32, 32, 3, padding=1),
                    norm(32),
                    nn.SiLU(),
                    nn.Conv2d(32, 32, 3, padding=1),
                    nn.SiLU(),
                )
                for _ in range(blocks)
            ]
        )
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Heavy(nn.Module):
    """Many weights and hardly any activations, in blocks."""

    def __init__(self, layers: int = 4, width: int = 512) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def images(batch: int, size: tuple[int, int]) -> tuple[Tensor, ...]:
    return (torch.empty(batch, 3, *size, device="meta"),)


def requested_step(batch: int, size: tuple[int, int]) -> TrainingStep:
    """A step to which every option applies."""
    return TrainingStep(
        images(batch, size), optimizer="adamw-foreach", ema=True, validation=images(8, (128, 128))
    )


def plain(batch: int, size: tuple[int, int]) -> TrainingStep:
    return TrainingStep(images(batch, size))


def by_name(ladder: FitReport) -> dict[str, FitOption]:
    return {option.name: option for option in ladder.options}


@pytest.fixture(scope="module")
def ladder() -> FitReport:
    """All options of the small network, on a GPU that needs none."""
    return fit_to_budget(
        Net(),
        requested_step(4, (64, 64)),
        budget_bytes=TOP,
        device=GPU,
        make_step=requested_step,
        multiple=32,
    )


def peak(step: TrainingStep, model: nn.Module | None = None) -> int:
    return traced_estimate(model or Net(), step, GPU).predicted_bytes


def test_all_options_are_there_in_order(ladder: FitReport) -> None:
    assert [option.name for option in ladder.options] == [
        "as requested",
        "fused optimizer",
        "validation one by one",
        "EMA on the host",
        "bf16 autocast",
        "selective checkpointing",
        "full checkpointing",
        "batch 2, accumulate 2",
        "batch 1, accumulate 4",
        "images of 32×32",
        "fewer diffusion steps",
    ]
    assert ladder.chosen == 0
    assert [option.status for option in ladder.options[:3]] == [
        "requested",
        "not needed",
        "not needed",
    ]


def test_figures_are_those_of_the_steps_they_name(ladder: FitReport) -> None:
    step = requested_step(4, (64, 64))
    one = images(1, (128, 128))
    steps = {
        "as requested": step,
        "fused optimizer": (step := dataclasses.replace(step, optimizer="adamw-fused")),
        "validation one by one": (step := dataclasses.replace(step, validation=one)),
        "EMA on the host": (step := dataclasses.replace(step, ema=False)),
        "bf16 autocast": (step := dataclasses.replace(step, autocast=torch.bfloat16)),
        "selective checkpointing": dataclasses.replace(step, checkpointing="selective"),
        "full checkpointing": (step := dataclasses.replace(step, checkpointing="full")),
        "batch 2, accumulate 2": (
            step := dataclasses.replace(step, inputs=images(2, (64, 64)), accumulate=2)
        ),
        "batch 1, accumulate 4": (
            step := dataclasses.replace(step, inputs=images(1, (64, 64)), accumulate=4)
        ),
    }
    by_title = by_name(ladder)
    assert {name: by_title[name].predicted_bytes for name in steps} == {
        name: peak(made) for name, made in steps.items()
    }


def test_freed_bytes_are_differences_of_traces(ladder: FitReport) -> None:
    first = ladder.requested.predicted_bytes
    before = first
    for option in ladder.options[1:]:
        assert option.predicted_bytes is not None
        assert option.freed_bytes == before - option.predicted_bytes
        assert option.freed_total_bytes == first - option.predicted_bytes
        if option.status != "no gain":
            before = option.predicted_bytes
    step = requested_step(4, (64, 64))
    alone = {
        "full checkpointing": dataclasses.replace(step, checkpointing="full"),
        "EMA on the host": dataclasses.replace(step, ema=False),
        "images of 32×32": requested_step(4, (32, 32)),
    }
    for name, changed in alone.items():
        assert by_name(ladder)[name].freed_alone_bytes == first - peak(changed)


def test_validation_is_the_peak_and_its_option_lowers_it(ladder: FitReport) -> None:
    assert ladder.requested.phase == "validation"
    option = by_name(ladder)["validation one by one"]
    assert (option.freed_alone_bytes or 0) > 0
    assert option.phase != "validation"


def test_an_average_on_the_host_is_paid_for_there(ladder: FitReport) -> None:
    weights = format_bytes(sum(weight.numel() * 4 for weight in Net().parameters()))
    assert by_name(ladder)["EMA on the host"].reason.startswith(f"{weights} of host memory")


def test_work_is_counted_and_not_assumed(ladder: FitReport) -> None:
    work = {name: option.work or 0 for name, option in by_name(ladder).items()}
    # All of the network is convolutions, which selective checkpointing keeps.
    assert work["as requested"] == work["bf16 autocast"] == work["selective checkpointing"] == 1
    # The blocks' forward is a third of their work, and almost all of the network's.
    assert 1.25 < work["full checkpointing"] < 4 / 3
    assert work["batch 1, accumulate 4"] == work["full checkpointing"]
    assert work["images of 32×32"] == work["full checkpointing"] / 4


def test_fewer_diffusion_steps_free_nothing_and_say_why(ladder: FitReport) -> None:
    option = ladder.options[-1]
    assert (option.freed_bytes, option.freed_alone_bytes, option.status) == (0, 0, "no gain")
    assert "none of its tensors has the steps" in option.reason


def test_the_first_option_that_fits_is_chosen(ladder: FitReport) -> None:
    target = by_name(ladder)["selective checkpointing"]
    assert target.upper_bytes is not None
    found = fit_to_budget(
        Net(),
        requested_step(4, (64, 64)),
        budget_bytes=target.upper_bytes,
        device=GPU,
        make_step=requested_step,
        full=False,
    )
    assert found.choice is not None
    assert found.choice.name == "selective checkpointing"
    assert found.require() == found.choice
    assert [option.status for option in found.options] == ["requested", *["applied"] * 5]
    # A byte less, and the next one is needed.
    less = fit_to_budget(
        Net(),
        requested_step(4, (64, 64)),
        budget_bytes=target.upper_bytes - 1,
        device=GPU,
        make_step=requested_step,
        full=False,
    )
    assert less.choice is not None
    assert less.choice.name == "full checkpointing"
    assert less.choice.fits
    assert f"> {less.choice.name}" in str(less)


def test_nothing_fits() -> None:
    loose = fit_to_budget(
        Net(blocks=1), plain(2, (32, 32)), budget_bytes=1 << 20, device=GPU, make_step=plain
    )
    with pytest.raises(BudgetError, match=r"no option fits in 1\.00 MiB on rtx3060-12gb") as error:
        loose.require()
    uppers = [option.upper_bytes for option in loose.options if option.upper_bytes is not None]
    assert error.value.smallest == loose.smallest.upper_bytes == min(uppers)
    assert loose.smallest.name in error.value.message
    assert loose.choice is None
    assert "no option fits in 1.00 MiB" in str(loose)


def test_checkpointing_frees_nothing_where_the_optimizer_is_the_peak() -> None:
    step = TrainingStep((torch.empty(4, 512, device="meta"),), optimizer="adamw-foreach")
    by_title = by_name(fit_to_budget(Heavy(), step, budget_bytes=TOP, device=GPU))
    assert by_title["full checkpointing"].status == "no gain"
    assert by_title["full checkpointing"].phase in ("backward", "optimizer")
    assert (by_title["full checkpointing"].freed_alone_bytes or 0) <= 0


def test_options_that_do_not_apply_say_why() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
    ladder = fit_to_budget(
        flat, plain(1, (16, 16)), budget_bytes=TOP, device=GPU, make_step=plain, multiple=8
    )
    by_title = by_name(ladder)
    reasons = {
        "fused optimizer": "adamw does not copy",
        "validation one by one": "there is no validation pass",
        "EMA on the host": "no EMA of the weights",
        "full checkpointing": "no repeated blocks and no chain of layers",
        "smaller batch, accumulated": "the batch is 1 already",
        "images of 8×8": "RuntimeError",
    }
    for name, words in reasons.items():
        option = by_title[name]
        assert (option.status, option.predicted_bytes, option.fits) == (
            "not applicable",
            None,
            None,
        )
        assert words in option.reason
        assert f"{name} " in str(ladder)
        assert f"does not apply: {option.reason}" in str(ladder)


def test_a_model_made_for_one_size_is_made_anew_for_others() -> None:
    class Sized(Net):
        def __init__(self, size: tuple[int, int]) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.zeros(3, *size))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.place)

    made = {(side, side): Sized((side, side)) for side in (16, 32, 48, 64)}
    step = plain(1, (64, 64))
    fixed = fit_to_budget(made[64, 64], step, budget_bytes=1, make_step=plain, full=False)
    refused = [option for option in fixed.options if option.name == "images of 48×48"]
    assert [option.status for option in refused] == ["not applicable"]
    report = fit_to_budget(
        made[64, 64],
        step,
        budget_bytes=1,
        make_step=plain,
        resize=made.__getitem__,
        full=False,
    )
    options_of = {option.name: option for option in report.options}
    smaller = options_of["images of 48×48"]
    alone = traced_estimate(
        made[48, 48],
        change_settings(step, report.options[0].settings, smaller.settings, plain),
        load_profile("cpu"),
        heap="default",
    )
    assert smaller.predicted_bytes == alone.predicted_bytes


def test_settings_requested_already_are_no_options() -> None:
    step = dataclasses.replace(
        plain(2, (16, 16)),
        autocast=torch.bfloat16,
        checkpointing="full",
        validation=images(1, (16, 16)),
        keywords={},
    )
    by_title = by_name(fit_to_budget(Net(blocks=2), step, budget_bytes=TOP, device=GPU))
    for name in ("bf16 autocast", "selective checkpointing", "full checkpointing"):
        assert "requested already" in by_title[name].reason
    assert "one image at a time already" in by_title["validation one by one"].reason
    assert "make_step is not given" in by_title["smaller batch, accumulated"].reason
    assert "make_step is not given" in by_title["smaller images"].reason


def test_low_precision_weights_need_no_autocast() -> None:
    model = Net(blocks=2).bfloat16()
    step = TrainingStep((torch.empty(1, 3, 16, 16, dtype=torch.bfloat16, device="meta"),))
    ladder = fit_to_budget(model, step, budget_bytes=TOP, device=GPU)
    assert by_name(ladder)["bf16 autocast"].reason == "the weights are in low precision already"


def test_batch_norms_change_with_the_batch_and_count_twice() -> None:
    def step(batch: int, size: tuple[int, int]) -> TrainingStep:
        return TrainingStep(images(batch, size))

    model = Net(nn.BatchNorm2d, blocks=2)
    found = fit_to_budget(model, step(2, (16, 16)), budget_bytes=TOP, device=GPU, make_step=step)
    by_title = by_name(found)
    assert by_title["batch 1, accumulate 2"].accuracy == "changes results"
    assert "fewer images" in by_title["batch 1, accumulate 2"].reason
    assert "updated twice" in by_title["full checkpointing"].reason


def test_batches_are_divisors_and_keep_the_effective_batch() -> None:
    found = fit_to_budget(
        Net(blocks=1),
        plain(6, (16, 16)),
        budget_bytes=1,
        device=GPU,
        make_step=plain,
        full=False,
    )
    batches = [option.settings for option in found.options if option.name.startswith("batch")]
    assert [(at.batch, at.accumulate) for at in batches] == [(3, 2), (1, 6)]


def test_a_third_micro_batch_takes_no_more_than_the_second() -> None:
    step = dataclasses.replace(plain(1, (32, 32)), accumulate=5)
    settings = StepMemorySettings.from_step(step, None, None)
    assert settings.accumulate == 5
    shorter = change_settings(step, settings, settings, None)
    assert shorter.accumulate == 2
    assert peak(shorter) == peak(step)


def test_on_the_cpu_a_change_that_costs_nothing_stays() -> None:
    step = dataclasses.replace(requested_step(2, (16, 16)), validation=None)
    ladder = fit_to_budget(
        Net(blocks=2),
        step,
        budget_bytes=1 << 30,
        device="cpu",
    )
    assert ladder.device == "cpu"
    by_title = by_name(ladder)
    # The activations are the peak, for now; no other option may free nothing and be kept.
    assert by_title["fused optimizer"].freed_alone_bytes == 0
    assert by_title["fused optimizer"].status == "not needed"
    assert by_title["full checkpointing"].settings.optimizer == "adamw-fused"
    assert by_title["EMA on the host"].reason == "on the CPU the host is the device"


def test_the_report_is_plain_data(ladder: FitReport) -> None:
    again = FitReport.model_validate_json(ladder.model_dump_json())
    assert again.options == ladder.options
    assert again.requested.model_dump() == ladder.requested.model_dump()
    assert again.requested.trace is None
    assert ladder.requested.trace is not None
    assert str(again) == str(ladder)
    text = str(ladder)
    for option in ladder.options:
        assert option.name in text
    assert text.splitlines()[-1].startswith("fits in 11.8 GiB")


def test_progress_is_reported() -> None:
    reported: list[str] = []
    fit_to_budget(
        Net(blocks=1),
        plain(1, (16, 16)),
        budget_bytes=TOP,
        device=GPU,
        full=False,
        progress=reported.append,
    )
    assert reported == ["as requested"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget_bytes": 0}, "must be above 0, not 0 bytes"),
        ({"device": "gtx99"}, "no device profile"),
        ({"make_step": plain, "batch": 3}, "returns inputs of shapes"),
    ],
)
def test_options_that_make_no_sense(options, words: str) -> None:
    options = {"budget_bytes": TOP, "device": GPU, **options}
    with pytest.raises(UsageError, match=words):
        fit_to_budget(Net(blocks=1), plain(1, (16, 16)), **options)


def test_a_step_that_cannot_be_traced() -> None:
    with pytest.raises(ModelError, match="cannot be traced: RuntimeError"):
        fit_to_budget(Net(), TrainingStep((torch.empty(1, 5, 8, 8),)), budget_bytes=TOP, device=GPU)
    frozen = Net(blocks=1).requires_grad_(False)
    with pytest.raises(UsageError, match="no weights to train"):
        fit_to_budget(frozen, plain(1, (16, 16)), budget_bytes=TOP, device=GPU)
