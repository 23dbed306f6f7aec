"""`lowtide train sr`: what people see."""

import json

import numpy as np
import pyvips
import yaml

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
    assert json.loads(again.out)["resumed_at"] == 4


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


def test_a_budget_below_the_smallest_step(lowtide, tmp_path):
    done = lowtide("train", "sr", str(config_in(tmp_path)), "--budget", "1MiB", "--json")
    assert done.code == 3
    assert json.loads(done.out)["error"]["smallest_bytes"] > 1 << 20
