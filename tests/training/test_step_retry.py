"""Memory that runs out in a training step: the same numbers with less of it, and what is said."""

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from test_loop import GAN, Drawn, config_of, log_of, trainer, weights_of
from test_other_task import SeriesConfig, given, rows_of, task_of
from torch import nn
from virtual_device import VirtualDevice

from lowtide import OutOfMemoryError
from lowtide.core.units import MIB
from lowtide.jobs.train.run import run_training

DEEP = {"type": "paragonsr2_m", "groups": 1, "blocks": 2, "features": 16, "window": 8, "shared": 2}


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Every recovery collects garbage; it need not look at all of PyTorch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def run(config, folder, capacity=None, fail_at=None, **more):
    """A training whose new tensors are on a virtual device, and that device."""
    one = trainer(config, folder, batches=Drawn(batch=1, patch=8), **more)
    with VirtualDevice(capacity, fail_at=fail_at) as device:
        one.run()
    return one, device


def test_a_fault_in_a_step_changes_no_number(tmp_path):
    """Checkpointing gives equal bits, and what a failed pass wrote (spectral norms) is undone."""
    config = config_of(total=2, network_d=GAN["network_d"], losses=GAN["losses"])
    config = config.model_copy(update={"network_g": DEEP})
    calm, device = run(config, tmp_path / "calm")
    assert calm.warnings == []
    heard = []
    one, _ = run(
        config,
        tmp_path / "disturbed",
        fail_at=int(0.62 * device.allocations),
        on_warning=heard.append,
    )
    again = "which was repeated with full checkpointing from here on"
    assert heard == one.warnings == [f"memory ran out in step 2, {again}"]
    assert log_of(tmp_path / "disturbed") == log_of(tmp_path / "calm")
    for name, weight in weights_of(calm).items():
        assert torch.equal(weight, one.ema_network.state_dict()[name]), name


class Attend(nn.Module):
    """Attention with a trained bias, which PyTorch's fused kernels refuse."""

    def __init__(self, encoder, length):
        super().__init__()
        self.encoder = encoder
        self.bias = nn.Parameter(torch.zeros(length, length))

    def forward(self, values, calendar):
        hidden = self.encoder(values, calendar)[:, None]
        return F.scaled_dot_product_attention(hidden, hidden, hidden, self.bias)[:, 0]


def attending(config, processes=None):
    task = task_of(config)
    task.networks["encoder"] = Attend(task.networks["encoder"], config.datasets.train.length)
    return task


def series(length, batch, **train):
    values = given(total=3, **train)
    values["datasets"] = {"train": {"length": length, "batch_size_per_gpu": batch}}
    return SeriesConfig.from_values(values)


def train_on(device, config, folder):
    """A whole training, of which all but the plan is on a virtual device."""
    with contextlib.ExitStack() as stack:
        return run_training(
            config, attending, folder, device="cpu", on_plan=lambda _: stack.enter_context(device)
        )


def losses(folder):
    return [row["mse"] for row in rows_of(folder) if "mse" in row]


def test_changes_are_made_in_order_until_the_step_fits(tmp_path):
    config = series(128, 48)
    enough = VirtualDevice()
    assert not train_on(enough, config, tmp_path / "calm").warnings
    kept, rest = "full checkpointing", "attention without score matrices, 4 micro-batches"
    for capacity, changes in ((30 * MIB, kept), (24 * MIB, f"{kept}, {rest}")):
        folder = tmp_path / str(capacity)
        report = train_on(VirtualDevice(capacity), config, folder)
        again = f"which was repeated with {changes} from here on"
        assert report.warnings == [f"memory ran out in step 1, {again}"]
        assert f"warning: {report.warnings[0]}" in str(report)
        assert losses(folder) == pytest.approx(losses(tmp_path / "calm"), abs=1e-5)
    full = VirtualDevice(fail_at=range(enough.allocations // 2, 2 * enough.allocations))
    words = r"memory ran out in step 2, also with full checkpointing, 48 micro-batches$"
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        train_on(full, config, tmp_path / "full")
    assert caught.value.hint == "a smaller network"
    # The optimizer has changed some of the weights: nothing can be repeated.
    with pytest.raises(OutOfMemoryError, match=r"memory ran out after step 2$") as caught:
        train_on(VirtualDevice(fail_at=enough.allocations - 45), config, tmp_path / "late")
    assert caught.value.hint == "a smaller --budget, or a smaller network"
