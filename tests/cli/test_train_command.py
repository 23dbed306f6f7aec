"""`lowtide train sr`: what people see."""

import json
from dataclasses import replace

import numpy as np
import pytest
import pyvips
import yaml

from lowtide import UsageError
from lowtide.cli.config_options import config_keys
from lowtide.cli.train import train_command
from lowtide.cli.train_sr import SR
from lowtide.training.tasks.sr_config import SrConfig


def config_in(folder, **more):
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        path = folder / "photos" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        noise = generator.integers(0, 256, (40, 48, 3), np.uint8)
        pyvips.Image.new_from_array(noise).pngsave(str(path))
    path = folder / "c.yml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "mine",
                "scale": 2,
                "datasets": {
                    "train": {
                        "dataroot_gt": str(folder / "photos"),
                        "lq_size": 8,
                        "batch_size_per_gpu": 2,
                    }
                },
                "network_g": {"type": "paragonconv", "features": 8, "blocks": 1},
                "train": {"total_iter": 4},
                **more,
            }
        )
    )
    return path


def test_the_example_is_a_configuration(lowtide):
    done = lowtide("train", "sr", "--example")
    assert done.code == 0
    assert SrConfig.from_values(yaml.safe_load(done.out)).name == "nano-x2"


def test_trains(lowtide, tmp_path):
    done = lowtide("train", "sr", str(config_in(tmp_path)), "-o", str(tmp_path / "runs"))
    assert done.code == 0, done.err
    assert "mine: 4 steps" in done.out
    assert "2 patches of 8 px a step" in done.err
    assert "step 4 of 4: l1loss" in done.err
    assert (tmp_path / "runs/mine/mine.safetensors").is_file()
    again = lowtide("train", "sr", str(tmp_path / "c.yml"), "-o", str(tmp_path / "runs"), "--json")
    assert json.loads(again.out)["resumed_step"] == 4


@pytest.mark.parametrize("device", ["cpu", "rtx3060-12gb"])
def test_a_dry_run_tells_memory_and_time_and_writes_nothing(lowtide, tmp_path, device):
    """Also of a GPU that is not here, and of a pair of networks."""
    losses = [{"type": "l1loss"}, {"type": "ganloss"}]
    judge = {"type": "munet", "features": 8, "widths": [1, 2], "window": 8, "shared": 2}
    words = "train", "sr", str(config_in(tmp_path)), "-o", str(tmp_path / "runs"), "--dry-run"
    done = lowtide(*words, "--device", device)
    assert done.code == 0, done.err
    assert "mine: 4 steps" in done.out and f"device: {device}" in done.out
    assert "2 patches of 8 px a step" in done.out and " s a step" in done.out
    assert not (tmp_path / "runs").exists()
    alone = lowtide(*words, "--device", device, "--json").json
    assert alone["status"] == "planned" and alone["plan"]["seconds"] > 0
    config_in(tmp_path, network_d=judge, train={"total_iter": 4, "losses": losses})
    both = lowtide(*words, "--device", device, "--json").json
    assert both["plan"]["predicted_bytes"] > alone["plan"]["predicted_bytes"]
    refused = lowtide(*words, "--device", "rtx1")
    assert refused.code == 2 and "no device profile" in refused.err


def test_quiet(lowtide, tmp_path):
    done = lowtide("train", "sr", str(config_in(tmp_path)), "-o", str(tmp_path), "-q")
    assert done.code == 0
    assert not done.err


def test_errors_name_the_place(lowtide, tmp_path):
    path = config_in(tmp_path, tran={})
    done = lowtide("train", "sr", str(path))
    assert done.code == 2
    assert "tran is not known (did you mean train?)" in done.err
    nothing = lowtide("train", "sr")
    assert nothing.code == 2
    assert "lowtide train sr CONFIG" in nothing.err
    missing = lowtide("train", "sr", str(tmp_path / "none.yml"))
    assert "none.yml: no such file" in missing.err
    # Whatever is no YAML file is taken for data.
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"")
    options = "--scale", "2", "--train.total-iter", "1"
    for data, words in ((tmp_path / "none", "no such folder"), (picture, "this is a file")):
        assert f"{data}: {words}" in lowtide("train", "sr", str(data), *options).err


def kept(folder, name="mine"):
    return json.loads((folder / name / "config.json").read_text())


def test_a_folder_and_options_are_enough(lowtide, tmp_path):
    config_in(tmp_path)
    words = [
        "--scale",
        "2",
        "--total-iter",
        "2",
        "--lq_size",
        "8",
        "--batch-size-per-gpu",
        "2",
        "--network-g",
    ]
    words += ["{type: paragonconv, blocks: 1}", "--network_g.features", "8"]
    done = lowtide("train", "sr", str(tmp_path / "photos"), *words, "-o", str(tmp_path))
    assert done.code == 0, done.err
    assert "photos-sr: 2 steps" in done.out
    config = kept(tmp_path, "photos-sr")
    assert config["network_g"] == {"type": "paragonconv", "blocks": 1, "features": 8}
    assert config["datasets"]["train"]["dataroot_gt"] == [str(tmp_path / "photos")]


def test_options_override_the_file(lowtide, tmp_path):
    words = ["train", "sr", str(config_in(tmp_path)), "-o", str(tmp_path / "runs")]
    words += ["--train.optim_g.lr", "2e-3", "--no-use-rot", "--losses", "[{type: mse}]"]
    words += ["--name", "other", "--train.total_iter", "2"]
    assert lowtide(*words).code == 0
    config = kept(tmp_path / "runs", "other")
    assert config["train"]["optim_g"]["lr"] == 2e-3
    assert not config["datasets"]["train"]["use_rot"] and config["datasets"]["train"]["use_hflip"]
    assert [loss["type"] for loss in config["train"]["losses"]] == ["mse"]
    assert config["network_g"]["features"] == 8
    longer = lowtide(*words, "--total-iter", "3", "--json")
    assert (longer.json["resumed_step"], longer.json["steps"]) == (2, 3)


# Other than the defaults, and such that they may stand together.
_OTHERS = {
    "scale": "4",
    "network_d": "{type: munet}",
    "filename_tmpl": "{}_x4",
    "type": {"adamw": "adam", "cosine": "multistep"},
    "losses": "[{type: l1loss, loss_weight: 2.0}]",
    "metrics": "{ssim: {type: ssim}}",
    "milestones": "[3, 5]",
    "betas": "[0.5, 0.75]",
    "eta_min": "0.25",
    "budget": "1GiB",
    "pretrain_network_g": "lowtide-x4",
}


def another_value(key):
    """The words of an option with another value than the default, and that value."""
    name = key.path[-1]
    option = f"--{key.dotted.replace('_', '-')}"
    if isinstance(key.default, bool):
        return [option if not key.default else f"--no-{option[2:]}"], not key.default
    if name.startswith("dataroot"):
        return [option, "a", option, "b"], ["a", "b"]
    known = _OTHERS.get(name)
    text = known[key.default] if isinstance(known, dict) else known
    if text is None and "checkpointing" in name:
        text = "full"
    if text is None and name in ("precision", "degradation", "name"):
        text = {"precision": "bf16", "degradation": "real", "name": "mine"}[name]
    if text is None and name == "network_g":
        text = "{type: paragonsr2_s}"
    if text is None:
        text = "0.75" if isinstance(key.default, float) or name == "grad_clip" else "64"
    return [option, text], text if name in ("name", "filename_tmpl") else yaml.safe_load(text)


def test_each_key_of_the_file_is_an_option(capsys):
    got = []

    def job(config, *_, **__):
        got.append(config.model_dump(mode="json"))
        raise UsageError("seen")

    command = train_command(replace(SR, job=lambda: job))
    keys = list(config_keys(SrConfig))
    words, expected = zip(*map(another_value, keys), strict=True)
    assert len(keys) > 45
    with pytest.raises(SystemExit):
        command.main([word for part in words for word in part])
    assert "seen" in capsys.readouterr().err
    for key, value in zip(keys, expected, strict=True):
        found = got[0]
        for name in key.path:
            found = found[name]
        if key.path[-1] == "losses":
            value = [{**value[0], "start_iter": 0, "ramp_iter": 0}]
        if key.path[-1] == "metrics":
            found = {name: {"type": one["type"]} for name, one in found.items()}
        assert found == value != key.default, key.dotted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--total-iter", "0"], "--total-iter: input should be greater than or equal to 1"),
        (["--train.optim-g.betas", "[1, 2]"], "--train.optim-g.betas.0: input should be less"),
        (["--losses", "[{type: l1"], "--losses [{type: l1 is not valid YAML"),
        (["--losses", "[{type: l1}, {type: L1}]"], "--losses: value error, l1 is listed 2 times"),
        (["--network-g.feature", "8"], "network_g"),
        (["--lq-sise", "8"], "No such option: --lq-sise"),
        (["--lr", "1"], "No such option: --lr"),  # of which optimizer?
        (["--scale", "5", "--ema-decay", "2"], "--scale: input should be 1, 2, 3, 4 or 8"),
        (["--network-g.type"], "--network-g.type needs a value"),
    ],
)
def test_errors_name_the_option(lowtide, tmp_path, words, said):
    done = lowtide("train", "sr", str(config_in(tmp_path)), "-o", str(tmp_path), *words)
    assert done.code == 2
    assert said in " ".join(done.err.replace("│", "").split())


def test_missing_keys_without_a_file_are_named_by_their_option(lowtide, tmp_path):
    config_in(tmp_path)
    done = lowtide("train", "sr", str(tmp_path / "photos"), "--lq-size", "8")
    assert done.code == 2
    assert "--scale is missing" in done.err
    assert "--train.total-iter is missing" in done.err


def test_help_has_a_panel_for_each_section(lowtide):
    done = lowtide("train", "sr", "--help")
    assert done.code == 0
    for title in ("datasets.train", "train.scheduler", "train.optim_d", "logger"):
        assert f"─ {title} ─" in done.out
    text = " ".join(done.out.replace("│", "").split())
    assert "--lq-size INTEGER Side of a patch in low-resolution pixels. [default: 32]" in text
    assert "--train.optim-d.lr NUMBER Learning rate. [default: 0.0001]" in text


def test_a_budget_below_the_smallest_step(lowtide, tmp_path):
    done = lowtide("train", "sr", str(config_in(tmp_path)), "--budget", "1MiB", "--json")
    assert done.code == 3
    assert json.loads(done.out)["error"]["smallest_bytes"] > 1 << 20
