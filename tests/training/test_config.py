"""Configurations are checked before anything starts, and say where and what."""

import pytest
import torch
import yaml
from torch.nn.utils import parameters_to_vector

from lowtide import UsageError
from lowtide.models.build_limits import BuildLimitsMode, NetworkTooLargeError
from lowtide.models.families import network_builders
from lowtide.training.run_config import LossEntry, SchedulerSection
from lowtide.training.setup import (
    ema_decay,
    loss_weight,
    lr_factor,
    make_discriminator,
    make_generator,
)
from lowtide.training.tasks.sr_config import SrConfig


def plain(**changes):
    return {
        "name": "mine",
        "scale": 2,
        "datasets": {"train": {"dataroot_gt": ["photos"]}},
        "network_g": {"type": "paragonsr2_nano"},
        "train": {"total_iter": 10},
        **changes,
    }


def scored(**metric):
    return {"val": {"metrics": {"one": metric}}}


def test_defaults_are_there():
    config = SrConfig.from_values(plain())
    assert config.datasets.train.lq_size == 32
    assert [one.type for one in config.train.losses] == ["l1loss"]
    assert config.val.metrics["psnr"].test_y_channel


@pytest.mark.parametrize("value", [2**31, 2**63, 2**70, -(2**70), 1e30, 1e300])
@pytest.mark.parametrize("key", ["total_iter", "warmup_iter", "ema_warmup"])
def test_numbers_have_a_bound(key, value):
    with pytest.raises(
        UsageError, match=f"train.{key}: (has to be|input should be|.* exceeded maximum size)"
    ):
        SrConfig.from_values(plain(train={"total_iter": 10, key: value}))


@pytest.mark.parametrize("value", [2**70, 1e300])
def test_numbers_of_open_sections_have_a_bound(value):
    with pytest.raises(UsageError, match="network_g: has to be at most 2,147,483,647"):
        SrConfig.from_values(plain(network_g={"type": "paragonconv", "features": [value]}))
    losses = [{"type": "l1loss", "any": {"deep": value}}]
    with pytest.raises(UsageError, match=r"train.losses.0: has to be at most 2,147,483,647"):
        SrConfig.from_values(plain(train={"total_iter": 10, "losses": losses}))


def test_a_seed_has_the_bound_of_all_commands():
    assert SrConfig.from_values(plain(manual_seed=2**63 - 1)).manual_seed == 2**63 - 1
    with pytest.raises(UsageError, match="manual_seed"):
        SrConfig.from_values(plain(manual_seed=2**63))


@pytest.mark.parametrize(
    "sizes", [{"features": 10**9, "blocks": 1}, {"features": 8, "blocks": 10**9}]
)
def test_a_network_larger_than_the_memory_is_refused(sizes):
    with pytest.raises(UsageError, match="network_g: a network of these sizes takes more than"):
        make_generator({"type": "paragonconv", **sizes}, 2, 0)


@pytest.mark.parametrize("calls_before", range(4))
def test_a_network_of_too_many_layers_leaves_gradients_on(calls_before):
    """Wherever among the calls of a layer the limit is met: layers turn gradients off and on."""
    with pytest.raises(NetworkTooLargeError), BuildLimitsMode([]):
        for _ in range(calls_before):
            torch.zeros(1)
        while True:
            with torch.no_grad():
                torch.zeros(1)
    assert torch.is_grad_enabled()


def test_one_folder_is_enough():
    config = SrConfig.from_values(plain(datasets={"train": {"dataroot_gt": "photos"}}))
    assert [str(path) for path in config.datasets.train.dataroot_gt] == ["photos"]


def test_errors_name_the_key():
    for changes, words in (
        ({"scal": 2}, r"scal is not known \(did you mean scale\?\)"),
        ({"train": {"total_iter": 9, "ema_decy": 0.9}}, r"train.ema_decy .* mean ema_decay"),
        ({"datasets": {"train": {"dataroot_gt": ["a"], "lq_sise": 3}}}, "mean lq_size"),
        ({"train": {}}, "train.total_iter is missing"),
        ({"scale": 5}, "scale: "),
        ({"train": {"total_iter": 0}}, "train.total_iter: "),
        ({"name": "a/b"}, "name: "),
        (
            {"train": {"total_iter": 9, "losses": [{"type": "l1loss"}, {"type": "L1Loss"}]}},
            "train.losses: .*l1loss is listed 2 times",
        ),
        ({"datasets": {"train": {"dataroot_gt": []}}}, "datasets.train.dataroot_gt: "),
        ({"val": {"metrics": {}}}, "val.metrics: .*at least 1"),
        ({"val": {"metrics": {"step": {}}}}, "val.metrics: .*step is reserved in the log"),
        ({"train": {"total_iter": 9, "optim_g": {"betas": [0.9, 1.0]}}}, "train.optim_g.betas.1: "),
        (
            {"train": {"total_iter": 9, "optim_d": {"betas": [-0.1, 0.9]}}},
            "train.optim_d.betas.0: ",
        ),
        ({"train": {"total_iter": 9, "optim_g": {"lr": 0}}}, "train.optim_g.lr: "),
        ({"train": {"total_iter": 9, "optim_g": {"lr": float("inf")}}}, "train.optim_g.lr: "),
        ({"train": {"total_iter": 9, "ema_decay": 1.0}}, "train.ema_decay: "),
        (
            {"train": {"total_iter": 9, "scheduler": {"milestones": [-5]}}},
            "train.scheduler.milestones.0: ",
        ),
        ({"train": {"total_iter": 9, "grad_clip": float("nan")}}, "train.grad_clip: "),
        (
            {"train": {"total_iter": 9, "losses": [{"type": "l1", "loss_weight": float("inf")}]}},
            "train.losses.0.loss_weight: ",
        ),
        (scored(type="lpips"), "val.metrics.one: .*lpips needs weights"),
        (scored(type="ssim", net="vgg"), "val.metrics.one: .*ssim takes neither weights nor net"),
        (scored(type="dists", weights="a.pth", net="alex"), "val.metrics.one: .*uses VGG16"),
        (scored(type="lpips", weights="a.pth", test_y_channel=True), "remove test_y_channel"),
    ):
        with pytest.raises(UsageError, match=words):
            SrConfig.from_values(plain(**changes))


def test_files(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text(yaml.safe_dump(plain()))
    assert SrConfig.from_file(path).name == "mine"
    for text in ("a: [", "- 1\n- 2", "just words"):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"c\.yml"):
            SrConfig.from_file(path)
    with pytest.raises(UsageError, match="no such file"):
        SrConfig.from_file(tmp_path / "none.yml")


LINES = """\
name: mine
scale: 2
datasets: {train: {dataroot_gt: [photos]}}
network_g: {type: paragonsr2_nano}
train: {total_iter: 10}
"""


def bomb(first, more):
    """Ten aliases of ten aliases of ..., eleven times."""
    rows = [f"a{row}: &a{row} " + more % ", ".join([f"*a{row - 1}"] * 10) for row in range(1, 12)]
    return "\n".join([f"a0: &a0 {first}", *rows, LINES])


def test_hostile_configurations_are_refused(tmp_path):
    for text, words in (
        (bomb("[x, x]", "[%s]"), "line 5: more than 20,000 values, aliases expanded"),
        (bomb("{k: 1}", "{<<: [%s]}"), "line 5: more than 20,000 values, aliases expanded"),
        (LINES + "val: &v {metrics: *v}", "line 6: more than 20,000 values"),
        ("x: " + "[" * 100_000, "line 1: more than 50 levels"),
        ("".join(f"{' ' * level}a:\n" for level in range(300)), "line 50: more than 50 levels"),
        (LINES + "manual_seed: " + "9" * 100_000, "line 6: a number with 100,000 digits"),
        (LINES + "manual_seed: 1" + ":10" * 40_000, "line 6: a number with 120,001 digits"),
        (LINES + "manual_seed: 0x" + "f" * 60, "manual_seed: input should be less"),
        (LINES.replace("10}", "10, grad_clip: .inf}"), "train.grad_clip: .*finite"),
        (LINES.replace("10}", "10, grad_clip: 1e999}"), "train.grad_clip: .*finite"),
        (LINES + "name: other", "line 6: 'name' is a duplicate key"),
        (LINES + "1: 2", "line 6: '1' is no key: keys are text"),
        (LINES + "on: 2", "line 6: 'on' is no key"),
        (LINES + "? [a]\n: 2", "line 6: 'a list or mapping' is no key"),
        (LINES.replace("mine", "2024-13-77"), "is not valid YAML: month must be in"),
        (LINES.replace("mine", "!!binary abc"), "line 1: failed to decode base64"),
        (LINES + "x: !!python/object/apply:os.system [ls]", "line 6: could not determine"),
        (LINES + "x: !!set {a}", "x is not known"),
        (LINES + "x: !!int abc", "is not valid YAML: invalid literal for int"),
        (LINES + "<<: 3", "line 6: .*expected a mapping or list of mappings"),
        (LINES + 'x: "\\Uffffffff"', "is not valid YAML"),
        ("%YAML " + "9" * 5000 + ".1\n---\n" + LINES, "is not valid YAML"),
        (LINES + "---\n" + LINES, "line 6: expected a single document"),
        (LINES + "#" * 300_000, "larger than 256 KiB"),
        (LINES + "".join(f"k{number}: 1\n" for number in range(2000)), "and 1,992 more"),
        (b"name: \xff", "cannot be read"),
    ):
        path = tmp_path / "c.yml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UsageError, match=rf"c\.yml.*{words}") as raised:
            SrConfig.from_file(path)
        assert len(raised.value.message) < 1000


def test_aliases_and_merges_are_taken(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text(
        "name: mine\nscale: 2\nnetwork_g: &net {type: paragonconv, features: 8}\n"
        "network_d: {<<: *net, features: 16}\n"
        "datasets:\n  train: &train {dataroot_gt: photos, dataroot_lq: [a, b]}\n"
        "  val: {<<: [{filename_tmpl: '{}_x2'}, *train], dataroot_gt: others}\n"
        "train: {total_iter: 0x10, optim_g: {lr: 1e-3, betas: [.9, 0.99]}, compile: off}\n"
    )
    config = SrConfig.from_file(path)
    assert config.network_d == {"type": "paragonconv", "features": 16}
    assert [str(one) for one in config.datasets.val.dataroot_lq] == ["a", "b"]
    assert [str(one) for one in config.datasets.val.dataroot_gt] == ["others"]
    assert config.datasets.val.filename_tmpl == "{}_x2"
    assert (config.train.total_iter, config.train.optim_g.lr) == (16, 1e-3)


def test_a_name_is_that_of_one_folder():
    for name in (
        "..",
        ".",
        "",
        "../up",
        "/etc",
        "a/b",
        "a\\b",
        "a\0b",
        "a:b",
        "a\n",
        "a b",
        ".hidden",
        "a.",
        "con",
        "NUL.x",
        "com1",
        "a" * 101,
    ):
        with pytest.raises(UsageError, match="name: "):
            SrConfig.from_values(plain(name=name))
        assert SrConfig.from_values(plain(name="nano-x2_v1.5")).name == "nano-x2_v1.5"


def test_names_of_entries_are_text():
    with pytest.raises(UsageError, match="keys should be strings"):
        SrConfig.from_values(plain(datasets={"train": {"dataroot_gt": ["a"], 5: 6}}))


def test_the_example_is_one():
    from lowtide.cli.train_sr import example

    config = SrConfig.from_values(yaml.safe_load(example()))
    assert config.network_g["type"] in network_builders("generators")


def test_every_generator_is_made():
    for kind in [name for name in network_builders("generators") if name[-2:] not in ("_l", "xl")]:
        options = {"features": 8, "blocks": 1} if kind == "paragonconv" else {}
        network = make_generator({"type": kind, **options}, 2, seed=1)
        again = make_generator({"type": kind.upper(), **options}, 2, seed=1)
        other = make_generator({"type": kind, **options}, 2, seed=2)
        first, same, differs = (
            parameters_to_vector(one.parameters()) for one in (network, again, other)
        )
        assert torch.equal(first, same)
        assert not torch.equal(first, differs)


def test_networks_that_cannot_be():
    for given, words in (
        ({"type": "paragonsr2_nan"}, "'paragonsr2_nan' is not known"),
        ({}, "'' is not known"),
        ({"type": "paragonsr2_nano", "feature": 3}, "feature"),
        ({"type": "paragonsr2_nano", "attention": "all"}, "window, hierarchical, none"),
        ({"type": "paragonconv"}, "features"),
    ):
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
    cosine = SchedulerSection(type="cosine", eta_min=0.1)
    shares = [lr_factor(cosine, step, 100, 10) for step in range(100)]
    assert shares[0] == pytest.approx(1 / 11)
    assert max(shares) == shares[10] > 0.97
    assert shares[-1] == pytest.approx(0.1, abs=1e-3)
    steps = SchedulerSection(type="multistep", milestones=[5, 8], gamma=0.5)
    assert [lr_factor(steps, step, 10, 0) for step in (4, 5, 8)] == [1.0, 0.5, 0.25]
    assert lr_factor(SchedulerSection(type="constant"), 7, 10, 0) == 1.0


def test_weights_of_losses_ramp_in():
    entry = LossEntry(type="ganloss", loss_weight=0.2, start_iter=10, ramp_iter=3)
    found = [loss_weight(entry, step) for step in (9, 10, 11, 13, 50)]
    assert found == pytest.approx([0, 0.05, 0.1, 0.2, 0.2])
    assert loss_weight(LossEntry(type="l1loss"), 0) == 1.0


def test_the_average_forgets_faster_in_the_beginning():
    decays = [ema_decay(0.999, 10, step) for step in (0, 9, 10**6)]
    assert decays == pytest.approx([1 / 11, 0.5, 0.999])
