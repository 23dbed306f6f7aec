"""`lowtide plan train`: what is printed where, exit codes, and every option's effect."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import pyvips
import typer
import yaml

from lowtide.cli.main import app

ROOT = Path(__file__).parent.parent.parent
CODE = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 16, 3, padding=1)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU()) for _ in range(3)
            )

        def forward(self, x, more=None):
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    def net():
        return Net()
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "given.py").write_text(textwrap.dedent(CODE))
    return f"{tmp_path / 'given.py'}:net"


@pytest.fixture
def plan(lowtide, net: str):
    """Run the command on a small network; further words override."""

    def run(*words, device="rtx3070-8gb"):
        return lowtide("plan", "train", net, "--batch", 2, "--size", 32, "--device", device, *words)

    return run


def test_the_plan_is_on_stdout_and_progress_elsewhere(plan, net: str) -> None:
    result = plan()
    assert result.code == 0
    assert result.out.startswith(f"{net}: ")
    for word in (
        "NVIDIA GeForce RTX 3070 8 GB, budget 7.37 GiB",
        "batch 2 of 32×32, adamw-foreach",
        "expected",
        "at most",
        "ledger     weights",
        "peak       in",
        "> as requested",
        "fused optimizer",
        "full checkpointing",
        "batch 1, accumulate 2",
        "images of 16×16",
        "none of its tensors has the steps",
        "fits in 7.37 GiB",
    ):
        assert word in result.out, word
    assert "tracing: full checkpointing" in result.err
    assert "tracing" not in result.out


@pytest.mark.parametrize("how", ["-q", "LOWTIDE_NO_PROGRESS"])
def test_silence(plan, monkeypatch, how: str) -> None:
    if how.startswith("LOWTIDE"):
        monkeypatch.setenv(how, "1")
    assert plan(*([how] if how.startswith("-") else [])).err == ""


def test_json(plan) -> None:
    result = plan("--json", "-q")
    assert result.code == 0
    data = result.json
    assert data["schema_version"] == 2
    assert data["device"] == "rtx3070-8gb"
    assert data["fit_report"]["chosen"] == 0
    assert data["fit_report"]["options"][0]["settings"]["size"] == [32, 32]
    assert {row["name"] for row in data["fit_report"]["requested"]["ledger"]} >= {
        "weights",
        "context",
    }


def test_nothing_fits_is_exit_code_3_with_the_plan_all_the_same(plan) -> None:
    text = plan("--budget", "1MiB", "-q")
    assert text.code == 3
    assert "no option fits in 1.00 MiB" in text.out
    assert text.err.startswith("error: no option fits in 1.00 MiB on rtx3070-8gb: the smallest")
    assert "hint: a budget of" in text.err
    data = plan("--budget", "1MiB", "-q", "--json")
    assert data.code == 3
    assert data.json["fit_report"]["chosen"] is None


def settings(result) -> dict:
    assert result.code == 0, result.err
    return result.json["fit_report"]["options"][0]["settings"]


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--batch", 3], "batch", 3),
        (["--size", "48x32"], "size", [32, 48]),
        (["--optimizer", "sgd"], "optimizer", "sgd"),
        (["--checkpointing", "full"], "checkpointing", "full"),
        (["--precision", "bf16"], "autocast", "bf16"),
        (["--ema"], "ema", "device"),
        (["--accumulate", 4], "accumulate", 4),
        (["--validation-batch", 5], "validation", 5),
    ],
    ids=lambda value: str(value),
)
def test_every_option_reaches_the_step(plan, words, name: str, value) -> None:
    plain, changed = plan("-q", "--json"), plan("-q", "--json", *words)
    assert settings(plain)[name] != value
    assert settings(changed)[name] == value
    memory = [r.json["fit_report"]["requested"]["ledger"] for r in (plain, changed)]
    assert memory[0] != memory[1]


def test_inputs_channels_and_validation_size(plan, lowtide, net: str) -> None:
    plain = plan("-q", "--json").json["fit_report"]["requested"]["live_bytes"]
    more = plan("-q", "--json", "--input", "3,h,w", "--input", "1000,1000").json
    # The second input is held for the whole step: 2 × 1000 × 1000 numbers.
    assert more["fit_report"]["requested"]["live_bytes"] == plain + 2 * 1000 * 1000 * 4
    wrong = plan("-q", "--channels", 5)
    assert wrong.code == 2
    assert "cannot be traced" in wrong.err
    large = plan("-q", "--json", "--validation-batch", 2, "--validation-size", 128).json
    assert large["fit_report"]["requested"]["phase"] == "validation"


def test_a_bundled_model_and_a_budget_in_percent(lowtide) -> None:
    result = lowtide(
        "plan",
        "train",
        "lowtide-x2",
        "--batch",
        1,
        "--size",
        16,
        "--device",
        "rtx4090",
        "--budget",
        "50%",
        "-q",
    )
    assert result.code == 0
    assert "lowtide-x2: 50,604 parameters" in result.out
    assert "budget 11.6 GiB" in result.out


def test_all_devices(lowtide, net: str) -> None:
    words = ["plan", "train", net, "--batch", 1, "--size", 16, "--all-devices", "-q"]
    result = lowtide(*words)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].split()[0] == "device"
    assert any(re.match(r"rtx3060-12gb +11\.4 GiB .* as requested$", line) for line in lines)
    assert not any(line.startswith("cpu") for line in lines)
    assert len(lowtide(*words, "--json").json["plans"]) == len(lines) - 1
    small = lowtide(*words, "--budget", "1MiB")
    assert small.code == 3
    assert small.out.splitlines()[1].endswith("none")
    both = lowtide(*words, "--device", "rtx3060")
    assert both.code == 2
    assert "contradicts" in both.err


def test_a_plot(plan, tmp_path: Path) -> None:
    assert plan("-q", "--plot", tmp_path / "memory.png").code == 0
    again = plan("-q", "--plot", tmp_path / "memory.png")
    assert again.code == 2 and "--force" in again.err
    assert plan("-q", "--force", "--plot", tmp_path / "memory.png").code == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


ERRORS = [
    (["lowtide-x2", "--device", "gtx99"], 2, "no device profile 'gtx99'", "did you mean"),
    (["nowhere.py:net"], 2, "nowhere.py: no such file", ""),
    (["nowhere:net"], 2, "no Python module 'nowhere'", "path/to/file.py:function"),
    (["{net}work"], 2, "has no 'network'", "functions there: Net, net"),
    (["math:pi"], 2, "neither a function nor a module, but of type float", ""),
    (["{net}", "--input", "3,q"], 2, "is not a shape", "h and w for the size"),
    (["{net}", "--size", "big"], 2, "not a number of pixels", "--size 256"),
    (["{net}", "--batch", "0"], 2, "--batch 0", ""),
    (["{net}", "--budget", "100GiB"], 2, "more than NVIDIA GeForce RTX 3070", "auto"),
    (["{net}", "--plot", "a.unknown"], 2, "not written as .unknown", ""),
]


def test_errors(lowtide, net: str) -> None:
    for words, code, message, hint in ERRORS:
        words = [word.format(net=net) for word in words]
        device = [] if "--device" in words else ["--device", "rtx3070-8gb"]
        result = lowtide("plan", "train", *words, *device, "-q")
        assert result.code == code, result.err
        assert result.out == ""
        assert message in result.err
        assert "Traceback" not in result.err
        assert hint in result.err


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    section = page.split("\n## lowtide plan train\n")[1].split("\n## ")[0]
    command = typer.main.get_command(app).commands["plan"].commands["train"]  # type: ignore[attr-defined]
    options = {
        name
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("-")
    }
    assert len(options) > 15
    assert not {name for name in options if not re.search(rf"`{name}[ `]", section)}
    assert set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) <= options


def test_help_loads_nothing_heavy_and_names_the_options(lowtide) -> None:
    result = lowtide("plan", "train", "--help")
    assert result.code == 0
    for word in ("Usage: lowtide plan train", "MODEL", "--all-devices", "--plot", "--input"):
        assert word in result.out


@pytest.mark.parametrize("model", ["lowtide-denoise", "lowtide-photo-denoise", "paragonsr2_nano"])
def test_denoisers_and_generators_are_planned_by_name(lowtide, model):
    words = "plan", "train", model, "--device", "rtx3060-12gb", "--batch-size", "1", "--size", "32"
    done = lowtide(*words, "--json")
    assert done.code == 0, done.err
    assert done.json["model"] == model and done.json["fit_report"]["chosen"] == 0


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 3), np.uint8)
    pyvips.Image.new_from_array(noise).pngsave(str(folder / "a.png"))
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    hours = pd.date_range("2024-01-01", periods=600, freq="h")
    values = np.random.default_rng(0).normal(size=(600, 3)) + np.sin(np.arange(600) / 4)[:, None]
    series = pd.DataFrame(values, columns=["a", "b", "c"])
    series.insert(0, "date", hours)
    series.to_csv(tmp_path / "load.csv", index=False)
    return tmp_path / "load.csv"


def written(path: Path, **values) -> Path:
    path.write_text(yaml.safe_dump({"name": "mine", "train": {"total_iter": 4}} | values))
    return path


def same_step(lowtide, words: list, kind: str) -> dict:
    """Require that a plan is that of the dry run of its training, and return it."""
    words = [*words, "--device", "rtx3060-12gb", "--json"]
    plan = lowtide("plan", "train", *words, "-q")
    assert plan.code == 0, plan.err
    run = lowtide("train", kind, *words, "--dry-run")
    assert run.code == 0, run.err
    assert plan.json["training"] == run.json["plan"]
    asked, step = plan.json["fit_report"]["options"][0], run.json["plan"]
    assert asked["predicted_bytes"] == step["predicted_bytes"]
    return plan.json


def test_a_pair_of_networks_is_planned_by_its_configuration(lowtide, tmp_path, photos) -> None:
    train = {"total_iter": 4, "losses": [{"type": "l1loss"}, {"type": "ganloss"}]}
    path = written(
        tmp_path / "pair.yml",
        scale=2,
        datasets={"train": {"dataroot_gt": str(photos), "lq_size": 8, "batch_size_per_gpu": 2}},
        network_g={"type": "paragonconv", "features": 8, "blocks": 1},
        network_d={"type": "munet", "features": 8, "widths": [1, 2], "window": 8, "shared": 2},
        train=train,
    )
    plan = same_step(lowtide, [path], "sr")
    assert plan["steps"] == 4 and plan["training"]["samples"] == "patches of 8 px"
    text = lowtide("plan", "train", path, "--batch-size-per-gpu", 4, "--device", "rtx3060", "-q")
    assert "4 steps: 4 patches of 8 px a step" in text.out and "estimated, not measured" in text.out
    assert "> as requested" in text.out and "batch 2, accumulate 2" in text.out
    # The words of the training after "plan", too.
    words = lowtide("plan", "train", "sr", path, "--device", "rtx3060", "-q", "--json")
    assert words.json["training"] == plan["training"]
    small = lowtide("plan", "train", path, "--device", "rtx3060", "--budget", "200MiB", "-q")
    assert small.code == 3 and "in 2 micro-batches" in small.out
    assert "no option fits in 200 MiB" in small.err


def test_a_denoiser_is_planned_by_its_configuration(lowtide, tmp_path, photos) -> None:
    path = written(
        tmp_path / "denoise.yaml",
        datasets={"train": {"dataroot_gt": str(photos), "patch_size": 16}},
        network={"features": 8, "multipliers": [1, 2]},
    )
    assert same_step(lowtide, [path], "denoise")["training"]["batch"] == 8


def live_bytes(plan: dict) -> int:
    return plan["fit_report"]["requested"]["live_bytes"]


FORECASTER = "--width 8 --image-size 16 --look-back 24 --horizons 8,12 --batch-size-per-gpu 16"


def test_ldm4ts_is_planned_as_its_training_would_be(lowtide, table) -> None:
    path = written(
        table.with_name("forecast.yml"),
        horizons=[8],
        datasets={"train": {"table": str(table)}},
        network={"look_back": 24},
    )
    words = [*FORECASTER.split(), "--attention-backend", "sdpa", "--total-iter", 4]
    plan = same_step(lowtide, [path, *words], "forecast")
    device = "--device", "rtx3060-12gb", "-q", "--json"
    named = lowtide("plan", "train", "ldm4ts", *words, "--series", 3, *device).json
    assert named["training"] == plan["training"]
    for more in (("--series", 7), ("--width", 16), ("--batch", 8), ("--size", 32)):
        other = lowtide("plan", "train", "ldm4ts", *words, "--series", 3, *more, *device).json
        assert live_bytes(other) != live_bytes(named), more
    given = lowtide("plan", "train", "ldm4ts", "--table", table)
    assert given.code == 2 and f"lowtide plan train forecast {table}" in given.err
    text = lowtide("plan", "train", "ldm4ts", *words, "--attention-backend", "flash", *device[:3])
    assert text.code == 0 and "attention backend flash" not in text.err
    if "note" in text.out:  # where it is not installed
        assert "fused SDPA runs instead" in text.out


def test_trainings_on_all_devices(lowtide) -> None:
    words = "plan", "train", "ldm4ts", *FORECASTER.split(), "-q", "--json"
    plans = lowtide(*words, "--all-devices").json["plans"]
    assert len(plans) > 5
    (card,) = (one for one in plans if one["device"] == "rtx3060-12gb")
    assert card["training"] == lowtide(*words, "--device", "rtx3060-12gb").json["training"]


def test_a_configuration_that_is_not_there_or_not_known(lowtide, tmp_path) -> None:
    missing = lowtide("plan", "train", tmp_path / "c.yml", "--device", "cpu")
    assert missing.code == 2 and "no such file" in missing.err
    (tmp_path / "c.yml").write_text("a: [1")
    damaged = lowtide("plan", "train", tmp_path / "c.yml", "--device", "cpu")
    assert damaged.code == 2 and str(tmp_path / "c.yml") in damaged.err


@pytest.mark.parametrize("kind", ["sr", "denoise", "forecast", "ldm4ts"])
def test_the_options_of_a_training_are_those_of_its_plan(lowtide, kind: str) -> None:
    help = lowtide("plan", "train", kind, "--help")
    assert help.code == 0 and "--all-devices" in help.out and "--total-iter" in help.out
