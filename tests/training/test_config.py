"""Configurations are checked before anything starts, and say where and what."""

import pytest
import torch
import yaml

from lowtide.core.errors import UsageError
from lowtide.training.config import LossEntry, Scheduler, parse_config, read_config
from lowtide.training.networks import GENERATORS, make_discriminator, make_generator
from lowtide.training.schedule import ema_decay, loss_weight, rate_share


def plain(**changes):
    return {
        "name": "mine", "scale": 2,
        "datasets": {"train": {"dataroot_gt": ["photos"]}},
        "network_g": {"type": "paragonsr2_nano"}, "train": {"total_iter": 10}, **changes,
    }  # fmt: skip


def scored(**metric):
    return {"val": {"metrics": {"one": metric}}}


def test_defaults_are_there():
    config = parse_config(plain())
    assert config.datasets.train.lq_size == 32
    assert [one.type for one in config.train.losses] == ["l1loss"]
    assert config.val.metrics["psnr"].test_y_channel


def test_one_folder_may_stand_alone():
    config = parse_config(plain(datasets={"train": {"dataroot_gt": "photos"}}))
    assert [str(path) for path in config.datasets.train.dataroot_gt] == ["photos"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scal": 2}, r"scal is not known \(did you mean scale\?\)"),
        ({"train": {"total_iter": 9, "ema_decy": 0.9}}, r"train.ema_decy .* mean ema_decay"),
        ({"datasets": {"train": {"dataroot_gt": ["a"], "lq_sise": 3}}}, "mean lq_size"),
        ({"train": {}}, "train.total_iter is missing"),
        ({"scale": 5}, "scale: "),
        ({"train": {"total_iter": 0}}, "train.total_iter: "),
        ({"name": "a/b"}, "name: "),
        ({"train": {"total_iter": 9, "losses": [{"type": "l1loss"}, {"type": "L1Loss"}]}},
         "train.losses: .*l1loss is there 2 times"),
        ({"datasets": {"train": {"dataroot_gt": []}}}, "datasets.train.dataroot_gt: "),
        ({"val": {"metrics": {}}}, "val.metrics: .*at least 1"),
        ({"val": {"metrics": {"step": {}}}}, "val.metrics: .*step is what the log calls"),
        ({"train": {"total_iter": 9, "optim_g": {"betas": [0.9, 1.0]}}}, "train.optim_g.betas.1: "),
        ({"train": {"total_iter": 9, "optim_d": {"betas": [-0.1, 0.9]}}},
         "train.optim_d.betas.0: "),
        ({"train": {"total_iter": 9, "optim_g": {"lr": 0}}}, "train.optim_g.lr: "),
        ({"train": {"total_iter": 9, "optim_g": {"lr": float("inf")}}}, "train.optim_g.lr: "),
        ({"train": {"total_iter": 9, "ema_decay": 1.0}}, "train.ema_decay: "),
        ({"train": {"total_iter": 9, "scheduler": {"milestones": [-5]}}},
         "train.scheduler.milestones.0: "),
        ({"train": {"total_iter": 9, "grad_clip": float("nan")}}, "train.grad_clip: "),
        ({"train": {"total_iter": 9, "losses": [{"type": "l1", "loss_weight": float("inf")}]}},
         "train.losses.0.loss_weight: "),
        (scored(type="lpips"), "val.metrics.one: .*lpips needs weights"),
        (scored(type="ssim", net="vgg"), "val.metrics.one: .*ssim has no weights and no net"),
        (scored(type="dists", weights="a.pth", net="alex"), "val.metrics.one: .*by VGG16"),
        (scored(type="lpips", weights="a.pth", test_y_channel=True), "leave test_y_channel out"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changes, words):
    with pytest.raises(UsageError, match=words):
        parse_config(plain(**changes))


def test_files(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text(yaml.safe_dump(plain()))
    assert read_config(path).name == "mine"
    for text in ("a: [", "- 1\n- 2", "just words"):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"c\.yml"):
            read_config(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path / "none.yml")


def test_the_example_is_one():
    from lowtide.cli.train import EXAMPLE

    config = parse_config(yaml.safe_load(EXAMPLE))
    assert config.network_g["type"] in GENERATORS


@pytest.mark.parametrize("kind", [name for name in GENERATORS if name[-2:] not in ("_l", "xl")])
def test_every_generator_is_made(kind):
    options = {"features": 8, "blocks": 1} if kind == "paragonconv" else {}
    network = make_generator({"type": kind, **options}, 2, seed=1)
    again = make_generator({"type": kind.upper(), **options}, 2, seed=1)
    other = make_generator({"type": kind, **options}, 2, seed=2)
    first, same, differs = (one.conv_in.weight for one in (network, again, other))
    assert torch.equal(first, same)
    assert not torch.equal(first, differs)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "paragonsr2_nan"}, "'paragonsr2_nan' is not known"),
        ({}, "'' is not known"),
        ({"type": "paragonsr2_nano", "feature": 3}, "feature"),
        ({"type": "paragonsr2_nano", "attention": "all"}, "window, hierarchical, none"),
        ({"type": "paragonconv"}, "features"),
    ],
)
def test_networks_that_cannot_be(given, words):
    with pytest.raises(UsageError, match=words):
        make_generator(given, 2, seed=0)


def test_discriminators():
    network = make_discriminator({"type": "MUNet", "features": 8, "widths": [1, 2]}, seed=0)
    assert network.config.widths == (1, 2)
    with pytest.raises(UsageError, match="width"):
        make_discriminator({"type": "munet", "width": 3}, seed=0)
    with pytest.raises(UsageError, match="'unet' is not known"):
        make_discriminator({"type": "unet"}, seed=0)


def test_the_rate_rises_and_falls():
    cosine = Scheduler(type="cosine", eta_min=0.1)
    shares = [rate_share(cosine, step, 100, 10) for step in range(100)]
    assert shares[0] == pytest.approx(1 / 11)
    assert max(shares) == shares[10] > 0.97
    assert shares[-1] == pytest.approx(0.1, abs=1e-3)
    steps = Scheduler(type="multistep", milestones=[5, 8], gamma=0.5)
    assert [rate_share(steps, step, 10, 0) for step in (4, 5, 8)] == [1.0, 0.5, 0.25]
    assert rate_share(Scheduler(type="constant"), 7, 10, 0) == 1.0


def test_weights_of_losses_ramp_in():
    entry = LossEntry(type="ganloss", loss_weight=0.2, start_iter=10, ramp_iter=3)
    found = [loss_weight(entry, step) for step in (9, 10, 11, 13, 50)]
    assert found == pytest.approx([0, 0.05, 0.1, 0.2, 0.2])
    assert loss_weight(LossEntry(type="l1loss"), 0) == 1.0


def test_the_average_forgets_faster_in_the_beginning():
    decays = [ema_decay(0.999, 10, step) for step in (0, 9, 10**6)]
    assert decays == pytest.approx([1 / 11, 0.5, 0.999])
