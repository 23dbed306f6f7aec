"""Planning a training: models by their path, steps from options, absent GPUs."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import BudgetError, ModelError, UsageError, estimate_vram_usage
from lowtide.cli.config_options import config_keys
from lowtide.jobs.train.plan import plan_training, plan_training_on_all_gpus
from lowtide.jobs.train.plan_report import DeviceTrainingPlans, TrainingPlan
from lowtide.jobs.train.settings import TrainSettings, parse_size
from lowtide.jobs.train.user_models import load_user_model
from lowtide.memory.prediction import estimate
from lowtide.memory.prediction.estimate import traced_estimate
from lowtide.memory.profiles import load_profile, profile_names
from lowtide.memory.tracing.steps import TrainingStep
from lowtide.memory.training.meta_build import parse_inputs
from lowtide.models.ldm4ts.config import LDM4TSConfig
from lowtide.models.ldm4ts.model import LDM4TSModel
from lowtide.training.run_config import members_of
from lowtide.training.tasks.denoise_config import DenoiseConfig
from lowtide.training.tasks.forecast_config import ForecastConfig
from lowtide.training.tasks.sr_config import SrConfig

GPU = load_profile("rtx3070-8gb")
CODE = """
    import helper_module
    from torch import nn

    def net():
        return nn.Sequential(nn.Conv2d(helper_module.CHANNELS, 8, 3), nn.ReLU(),
                             nn.Conv2d(8, 3, 3))

    def sized(width):
        return nn.Conv2d(3, width, 3)

    def wrong():
        return {"no": "module"}

    def broken():
        return 1 / 0

    ready = nn.Conv2d(3, 8, 3)
    number = 7
"""


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))


class TwoInputs(nn.Module):
    """An image and a time, made by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(1, 4)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + self.time(time[:, None])[:, :, None, None]

    def example_inputs(self, batch: int, size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        return torch.empty(batch, 4, *size), torch.empty(batch)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "models.py").write_text(textwrap.dedent(CODE))
    (tmp_path / "helper_module.py").write_text("CHANNELS = 3\n")
    yield str(tmp_path / "models.py")
    for name in ("helper_module", "lowtide_given_models"):
        sys.modules.pop(name, None)


def test_models_are_found_by_their_place(place: str, tmp_path: Path, monkeypatch) -> None:
    before = list(sys.path)
    built = load_user_model(f"{place}:net")
    assert built.name == f"{place}:net"
    assert all(weight.is_meta for weight in built.module.parameters())
    assert not next(load_user_model(f"{place}:ready").module.parameters()).is_meta
    # A package is looked for in the working folder, too, as Python itself does.
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_user_model("models:net").module, nn.Sequential)
    assert sys.path == before
    sys.modules.pop("models")
    assert load_user_model(net).name == "net"
    module = net()
    assert load_user_model(module).module is module


@pytest.mark.parametrize(
    ("name", "kind", "words", "hint"),
    [
        ("nothing", UsageError, "has no 'nothing'", "functions there: net, sized, wrong, broken"),
        ("sized", UsageError, "needs arguments: missing a required argument: 'width'", "none"),
        ("wrong", ModelError, "returned a dict, not a torch.nn.Module", ""),
        ("broken", ModelError, "failed: ZeroDivisionError: division by zero", "--debug"),
        ("number", ModelError, "neither a function nor a module, but of type int", ""),
    ],
)
def test_places_without_a_model(place: str, name: str, kind: Any, words: str, hint: str) -> None:
    with pytest.raises(kind) as error:
        load_user_model(f"{place}:{name}")
    assert words in error.value.message
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("missing.py:net", UsageError, "missing.py: no such file"),
        ("no_such_package.models:net", UsageError, "no Python module 'no_such_package.models'"),
        ("lowtide-x3", ModelError, "no model 'lowtide-x3'"),
        ("missing.safetensors", ModelError, "missing.safetensors"),
    ],
)
def test_places_that_do_not_exist(what: str, kind: Any, words: str) -> None:
    with pytest.raises(kind) as error:
        load_user_model(what)
    assert words in error.value.message


def test_a_file_without_a_function_or_with_a_fault(place: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load_user_model(place)
    assert f"{place}:build_model" in (error.value.hint or "")
    (tmp_path / "faulty.py").write_text("import no_such_package\n")
    with pytest.raises(ModelError, match="failed: ModuleNotFoundError: No module named"):
        load_user_model(f"{tmp_path / 'faulty.py'}:net")


def test_a_plan_is_that_of_the_step(monkeypatch) -> None:
    model = net()
    plan = plan_training(
        model,
        batch=2,
        size=(32, 48),
        device="rtx3070-8gb",
        ema=True,
        accumulate=2,
        validation_batch=3,
        precision="bf16",
        full=False,
    )
    step = TrainingStep(
        (torch.empty(2, 3, 32, 48, device="meta"),),
        optimizer="adamw-foreach",
        ema=True,
        accumulate=2,
        autocast=torch.bfloat16,
        validation=(torch.empty(3, 3, 32, 48, device="meta"),),
    )
    expected = traced_estimate(model, step, GPU)
    assert plan.fit_report.requested.ledger == expected.ledger
    assert plan.budget_bytes == GPU.total_bytes - GPU.desktop_bytes
    assert plan.parameters == sum(weight.numel() for weight in model.parameters())
    assert plan.fits
    again = TrainingPlan.model_validate_json(plan.model_dump_json())
    assert str(again) == str(plan)
    for word in ("Sequential: 443 parameters", "NVIDIA GeForce RTX 3070", "ledger", "context"):
        assert word in str(plan)


def test_the_weights_of_a_bundled_model_are_trained() -> None:
    plan = plan_training("lowtide-x2", batch=1, size=(16, 16), device="rtx3070-8gb", full=False)
    # Two moments of each weight in fp32.
    state = {row.name: row.value for row in plan.fit_report.requested.ledger}["optimizer state"]
    assert state >= 2 * 4 * plan.parameters


@pytest.mark.parametrize(
    ("optimizer", "device", "taken"),
    [
        ("auto", "rtx3070-8gb", "adamw-foreach"),
        ("auto", "cpu", "adamw"),
        ("sgd", "rtx3070-8gb", "sgd"),
    ],
)
def test_the_optimizer_is_pytorchs_own_by_default(optimizer: str, device: str, taken: str) -> None:
    plan = plan_training(
        net(), batch=1, size=(8, 8), device=device, optimizer=optimizer, full=False
    )
    assert plan.fit_report.options[0].settings.optimizer == taken


def test_inputs_of_the_model_the_words_or_the_channels() -> None:
    own = plan_training(TwoInputs(), batch=2, size=(8, 8), device=GPU, full=False)
    words = plan_training(
        TwoInputs(), batch=2, size=(64, 64), inputs=("4,h/8,w/8", ""), device=GPU, full=False
    )
    assert own.fit_report.requested.ledger == words.fit_report.requested.ledger
    gray = nn.Sequential(nn.Flatten(2), nn.Linear(64, 64))
    plan_training(gray, batch=1, size=(8, 8), channels=1, device=GPU, full=False)
    with pytest.raises(UsageError, match="no convolution"):
        plan_training(gray, batch=1, size=(8, 8), device=GPU, full=False)


def test_shapes_in_words() -> None:
    made = parse_inputs(("3,h,w", "4, h/8, w/8:float16", ":int64", "77,768"))(2, (64, 32))
    assert [(tuple(t.shape), t.dtype) for t in made] == [
        ((2, 3, 64, 32), torch.float32),
        ((2, 4, 8, 4), torch.float16),
        ((2,), torch.int64),
        ((2, 77, 768), torch.float32),
    ]
    assert all(tensor.is_meta for tensor in made)
    assert parse_size("256") == (256, 256)
    assert parse_size("320x240") == (240, 320)
    for text in ("3,h,q", "3,,4", "3:floaty", "h/0", "3:4:5", "3,-4"):
        with pytest.raises(UsageError, match="is not a shape"):
            parse_inputs((text,))
    for text in ("", "0", "12x", "big", "3x0"):
        with pytest.raises(UsageError, match="not a number of pixels"):
            parse_size(text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 0}, "--batch 0"),
        ({"accumulate": 0}, "--accumulate 0"),
        (
            {"optimizer": "lion"},
            "--optimizer lion is not one of 'auto', 'adamw', .*'sgd-momentum'$",
        ),
        ({"bach": 3}, "no setting 'bach'"),
        ({"inputs": ("3,h,w",), "channels": 3}, "contradict each other"),
        ({"validation_size": (8, 8)}, "--validation-size without --validation-batch"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TrainSettings.of(**settings)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("auto", GPU.total_bytes - GPU.desktop_bytes),
        ("50%", (GPU.total_bytes - GPU.desktop_bytes) // 2),
        ("6GiB", 6 << 30),
        (1 << 30, 1 << 30),
    ],
)
def test_budgets_of_an_absent_gpu(budget: Any, expected: int) -> None:
    plan = plan_training(net(), batch=1, size=(8, 8), device=GPU, budget=budget, full=False)
    assert plan.budget_bytes == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "9GiB"}, "is more than NVIDIA GeForce RTX 3070 8 GB has"),
        ({"budget": "0%"}, "is not a percentage"),
        ({"budget": "much"}, "is not a number of bytes"),
        ({"device": "gtx99"}, "no device profile 'gtx99'"),
        ({"device": "cuda:7"}, "there is no device 'cuda:7'"),
        ({"plot": "picture.unknown"}, "not written as .unknown"),
    ],
)
def test_devices_and_budgets_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    options = {"device": GPU, "batch": 1, "size": (8, 8), **options}
    with pytest.raises(UsageError, match=words):
        plan_training(net(), **options)


def test_without_a_gpu_one_must_be_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, which is taken")
    with pytest.raises(UsageError, match="no other is named to plan for") as error:
        plan_training(net())
    assert "--device cpu, or one of laptop-6gb" in (error.value.hint or "")


def test_sizes_that_a_model_file_does_not_take(monkeypatch) -> None:
    from dataclasses import replace

    import lowtide
    from lowtide.jobs.train import user_models
    from lowtide.models import SizeRule

    model = lowtide.load("lowtide-x2")
    model.descriptor = replace(model.descriptor, size=SizeRule(minimum=32, multiple_of=24))
    monkeypatch.setattr(user_models, "load", lambda name: model)
    with pytest.raises(UsageError, match="does not accept images of 50×40") as error:
        plan_training("a", size=(40, 50), device=GPU)
    assert error.value.hint == "--size 72x48"
    plan = plan_training("a", batch=1, size=(192, 192), device=GPU)
    sizes = [
        rung.settings.size for rung in plan.fit_report.options if rung.name.startswith("images")
    ]
    assert sizes == [(144, 144), (96, 96), (48, 48)]


def test_nothing_fits() -> None:
    options: dict[str, Any] = dict(batch=1, size=(16, 16), device=GPU, budget="1MiB", full=False)
    plan = plan_training(net(), **options)
    assert not plan.fits
    assert "no option fits in 1.00 MiB" in str(plan)
    with pytest.raises(BudgetError):
        plan.require()


def test_all_gpus(tmp_path: Path) -> None:
    reported: list[str] = []
    plans = plan_training_on_all_gpus(
        net(), batch=1, size=(16, 16), budget="7GiB", progress=reported.append
    )
    gpus = [name for name in profile_names() if name != "cpu"]
    assert [plan.device for plan in plans.plans] == reported == gpus
    assert plans.fits
    plans.require()
    by_gpu = {plan.device: plan for plan in plans.plans}
    # No GPU gets a budget above its memory.
    laptop = load_profile("laptop-6gb")
    assert by_gpu["laptop-6gb"].budget_bytes == laptop.total_bytes - laptop.desktop_bytes
    assert by_gpu["rtx3060-12gb"].budget_bytes == 7 << 30
    assert len(str(plans).splitlines()) == len(gpus) + 1
    assert DeviceTrainingPlans.model_validate_json(plans.model_dump_json()).fits
    with pytest.raises(BudgetError, match="nothing fits any GPU"):
        plan_training_on_all_gpus(net(), batch=1, size=(16, 16), budget="1MiB").require()


class Attending(nn.Module):
    """Attention in low precision, whose kernel and workspace depend on the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.conv(x).flatten(2).transpose(1, 2)[:, None].contiguous()
        return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 1)


@pytest.mark.parametrize(("model", "least"), [(net, 1), (Attending, 2)])
def test_a_step_is_traced_once_for_all_gpus_that_run_it_alike(model, least, monkeypatch) -> None:
    options: dict[str, Any] = dict(batch=4, size=(32, 32), precision="bf16")
    alone = {
        name: plan_training(model(), device=name, full=False, **options).fit_report.requested
        for name in profile_names()
        if name != "cpu"
    }
    traced, trace_step = [], estimate.trace_step
    monkeypatch.setattr(
        estimate, "trace_step", lambda *a, **k: traced.append(1) or trace_step(*a, **k)
    )
    plans = plan_training_on_all_gpus(model(), **options).plans
    assert least <= len(traced) < len(plans)
    assert (least == 1) == (len(traced) == 1)
    for plan in plans:
        assert plan.fit_report.requested.ledger == alone[plan.device].ledger


def test_a_plot(tmp_path: Path) -> None:
    plan_training(
        net(), batch=1, size=(16, 16), device=GPU, full=False, plot=tmp_path / "memory.svg"
    )
    text = (tmp_path / "memory.svg").read_text()
    assert "Sequential on NVIDIA GeForce RTX 3070 8 GB" in text
    assert "budget" in text


def test_the_example_runs() -> None:
    path = Path(__file__).parent.parent.parent / "examples" / "plan_training.py"
    for name, size in (("unet", (32, 32)), ("dit", (64, 64))):
        plan = plan_training(f"{path}:{name}", batch=2, size=size, device=GPU, full=False)
        assert plan.fits
        assert plan.fit_report.requested.method == "traced"


@pytest.mark.parametrize(
    "numbers",
    [
        {"size": "1000000000"},
        {"batch": 10**9, "size": "64"},
        {"batch": 2**31 - 1, "size": "2147483647"},
        {"batch": 2**63, "size": "64"},
        {"size": str(2**70)},
        {"size": "64", "channels": 2**31 - 1},
        {"size": "64", "accumulate": 2**70},
        {"size": "64", "validation_batch": 10**12},
        {"size": "64", "inputs": (f"{2**70},h,w",)},
    ],
)
def test_numbers_of_which_no_size_can_be_made_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"no device has|has to be at most|is not a shape"):
        plan_training("lowtide-x2", device="cpu", full=False, **numbers)


def test_model_estimate_plan_and_trainings_have_one_default() -> None:
    """Neither autocast nor checkpointing."""
    step = TrainingStep((torch.empty(1),))
    assert (step.autocast, step.checkpointing) == (None, "none")
    assert (TrainSettings.precision, TrainSettings.checkpointing) == ("fp32", "none")
    for config in (SrConfig, DenoiseConfig, ForecastConfig):
        defaults = {key.dotted: key.default for key in config_keys(config)}
        assert defaults["precision"] == "fp32"
        assert defaults["train.checkpointing"] in ("none", None)  # None: its section is required
        (section,) = members_of(config.model_fields["train"].annotation)
        assert section.model_fields["checkpointing"].default == "none"
    assert not LDM4TSConfig().gradient_checkpointing
    assert not inspect.signature(LDM4TSModel).parameters["enable_gradient_checkpointing"].default
    estimated = inspect.signature(estimate_vram_usage).parameters
    assert not estimated["gradient_checkpointing"].default
