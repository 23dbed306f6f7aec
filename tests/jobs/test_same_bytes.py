"""The same command makes the same bytes, whatever a clock says while the model is measured."""

import time

import numpy as np
import pytest
import torch

import lowtide
from lowtide.training.setup import make_generator, save_weights
from lowtide.training.tasks.sr_config import SrConfig

NETWORK = {"type": "paragonconv", "features": 8, "blocks": 1}


@pytest.fixture
def pictures(tmp_path, save):
    """In 16 bits, where a last place of a float shows."""
    drawn = np.random.default_rng(0)
    for height, width in ((40, 56), (72, 200), (300, 230)):
        image = drawn.integers(0, 1 << 16, (height, width, 3), np.uint16)
        save(tmp_path / "in" / f"{width}.png", image)
    return tmp_path / "in"


def model_in(path):
    """A file of a network none of whose weights are zero."""
    config = SrConfig.from_values(
        {
            "name": "drawn",
            "scale": 2,
            "datasets": {"train": {"dataroot_gt": ["none"]}},
            "network_g": NETWORK,
            "train": {"total_iter": 1},
        }
    )
    generator = make_generator(NETWORK, 2, seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in generator.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return save_weights(path, generator, config)


class DrawnClock:
    """Seconds that pass from look to look as on a machine with much else to do: by chance."""

    def __init__(self, seed):
        self._drawn, self._now = np.random.default_rng(seed), 0.0

    def __call__(self):
        self._now += float(self._drawn.lognormal(-6, 1))
        return self._now


def test_the_same_command_makes_the_same_bytes_with_a_new_cache(pictures, tmp_path, monkeypatch):
    model = model_in(tmp_path / "model.safetensors")
    made, plans, predicted_seconds = [], [], []
    for seed in range(3):
        monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / f"cache{seed}"))
        with monkeypatch.context() as patched:
            patched.setattr(time, "process_time", DrawnClock(seed))
            report = lowtide.upscale(
                pictures, tmp_path / f"out{seed}", model=str(model), budget="1GiB"
            )
        made.append([path.read_bytes() for path in sorted((tmp_path / f"out{seed}").glob("*.png"))])
        plans.append([(one.plan.title, one.plan.channels_last) for one in report.images])
        predicted_seconds.append([one.plan.seconds for one in report.images])
    assert len(made[0]) == 3
    assert plans[1] == plans[2] == plans[0]
    assert made[1] == made[2] == made[0]
    # No clock is read before the first run; later it affects the predicted seconds alone.
    assert predicted_seconds[1] == predicted_seconds[0]
