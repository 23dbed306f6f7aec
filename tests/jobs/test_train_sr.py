"""`lowtide train sr` as a function: real pictures, a real process that is killed, real errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import pyvips
import torch
import yaml

import lowtide
from lowtide import BudgetError, InputError, UsageError
from lowtide.jobs.train.memory import plan_step
from lowtide.jobs.upscale.train import make_sr_task, train_sr
from lowtide.training.distributed import SINGLE_PROCESS
from lowtide.training.tasks.sr_config import SrConfig


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three small parts of a photograph to train on, one to validate with, and pairs of them."""
    from skimage.data import astronaut

    from lowtide.models.resample import resize_cubic

    folder, whole = tmp_path_factory.mktemp("photos"), astronaut()
    for number, (top, left) in enumerate(((0, 120), (150, 150), (300, 60), (40, 330))):
        part = np.ascontiguousarray(whole[top : top + 96, left : left + 120])
        kind = "train" if number < 3 else "val"
        for name, image in (("hr", part), ("lr", resize_cubic(part, 48, 60))):
            path = folder / kind / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pyvips.Image.new_from_array(image).pngsave(str(path))
    return folder


def plain(photos, total=6, **more):
    return {
        "name": "mine",
        "scale": 2,
        "datasets": {
            "train": {
                "dataroot_gt": str(photos / "train/hr"),
                "lq_size": 16,
                "batch_size_per_gpu": 4,
            },
            "val": {"dataroot_gt": str(photos / "val/hr")},
        },
        "network_g": {"type": "paragonconv", "features": 8, "blocks": 2},
        "train": {"total_iter": total, "optim_g": {"lr": 1e-3}},
        "val": {"val_freq": total, "metrics": {"psnr": {"type": "psnr"}, "ssim": {"type": "ssim"}}},
        "logger": {"print_freq": 1, "save_checkpoint_freq": 2},
        **more,
    }


def rows_of(folder):
    return [json.loads(line) for line in (folder / "mine" / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("pairs", [False, True])
def test_trains_and_scores_and_keeps_what_it_made(photos, tmp_path, pairs):
    given = plain(photos)
    if pairs:
        for kind in ("train", "val"):
            given["datasets"][kind]["dataroot_lq"] = str(photos / kind / "lr")
    planned, steps = [], []
    report = train_sr(
        SrConfig.from_values(given), tmp_path, on_plan=planned.append, on_step=steps.append
    )
    assert report.steps == 6 == steps[-1].step
    assert planned == [report.plan]
    assert planned[0].upper_bytes <= planned[0].budget_bytes
    assert 15 < report.scores["psnr"] < 60
    assert 0.5 < report.scores["ssim"] < 1
    for weights in (report.weights, report.best_weights):
        model = lowtide.load(weights)
        assert (model.descriptor.scale, model.descriptor.architecture) == (2, "ParagonConv")
    assert rows_of(tmp_path)[-1]["best"] is True


def test_scores_are_those_of_lowtide_upscale(photos, tmp_path):
    """Whole pictures, whatever the budget: nothing is shrunk to fit."""
    from lowtide.core.metrics import psnr_y

    report = train_sr(SrConfig.from_values(plain(photos)), tmp_path)
    made = tmp_path / "made.png"
    lowtide.upscale(photos / "val/lr/3.png", made, model=report.weights, budget="1GiB")
    pictures = [
        pyvips.Image.new_from_file(str(path)).numpy() for path in (made, photos / "val/hr/3.png")
    ]
    assert report.scores["psnr"] == pytest.approx(psnr_y(*pictures, 2), abs=1e-9)


def test_the_network_is_measured_once_for_all_validations(photos, tmp_path):
    """And pictures of one name, from two folders, are two pictures."""
    from lowtide.core.metrics import psnr_y

    given = plain(photos)
    for name, root in (("dataroot_gt", "hr"), ("dataroot_lq", "lr")):
        other = tmp_path / root
        other.mkdir()
        shutil.copy(photos / f"train/{root}/1.png", other / "3.png")
        given["datasets"]["val"][name] = [str(photos / "val" / root), str(other)]
    given["val"] |= {"val_freq": 2, "save_img": True}
    report = train_sr(SrConfig.from_values(given), tmp_path)
    assert len([row for row in rows_of(tmp_path) if "psnr" in row]) == 3
    assert len(list((tmp_path / "cache").glob("plans/costs-*"))) == 1
    shown = list((tmp_path / "mine/visualization").glob("*/*_6.png"))
    assert len(shown) == 2
    figures = []
    for place in (photos / "val", tmp_path):
        lowtide.upscale(
            place / "lr/3.png",
            tmp_path / "made.png",
            model=report.weights,
            budget="1GiB",
            force=True,
        )
        pictures = (tmp_path / "made.png", place / "hr/3.png")
        figures.append(
            psnr_y(*(pyvips.Image.new_from_file(str(one)).numpy() for one in pictures), 2)
        )
    assert report.scores["psnr"] == pytest.approx(sum(figures) / 2, abs=1e-9)


@pytest.fixture(scope="module")
def alex_file(tmp_path_factory):
    """AlexNet's convolutions with random weights, as torchvision names them."""
    from safetensors.torch import save_file
    from torchvision.models import alexnet

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("alex") / "alex.safetensors"
    state = alexnet(weights=None).features.state_dict()
    save_file({f"features.{name}": value for name, value in state.items()}, path)
    return path


def test_lpips_chooses_the_weights_with_the_lowest_score(photos, tmp_path, alex_file):
    from lowtide.training.losses.perceptual import PerceptualMetric

    given = plain(photos)
    metric = {"type": "lpips", "weights": str(alex_file), "crop_border": 2}
    given["val"] = {"val_freq": 2, "metrics": {"lpips": metric, "psnr": {}}}
    report = train_sr(SrConfig.from_values(given), tmp_path)
    scored = [row for row in rows_of(tmp_path) if "lpips" in row]
    lowest = float("inf")
    for row in scored:
        assert row["best"] is (row["lpips"] < lowest)
        lowest = min(lowest, row["lpips"])
    assert len(scored) == 3
    assert len({row["lpips"] for row in scored}) == 3

    made = tmp_path / "made.png"
    lowtide.upscale(photos / "val/lr/3.png", made, model=report.weights, budget="1GiB")
    inner = [
        torch.from_numpy(pyvips.Image.new_from_file(str(path)).numpy()[2:-2, 2:-2].copy()).permute(
            2, 0, 1
        )[None]
        / 255
        for path in (made, photos / "val/hr/3.png")
    ]
    expected = PerceptualMetric("lpips", alex_file)(*inner).item()
    assert report.scores["lpips"] == pytest.approx(expected, rel=1e-5)


def test_images_too_small_for_a_metric_are_named_before_the_first_step(photos, tmp_path, alex_file):
    def refused(error, words, **changes):
        given = plain(photos)
        given["val"] = {"metrics": {"lpips": {"type": "lpips", "weights": str(alex_file)}}}
        given["val"]["metrics"]["lpips"] |= changes.pop("metric", {})
        given["val"] |= changes
        with pytest.raises(error, match=words) as caught:
            train_sr(SrConfig.from_values(given), tmp_path, on_step=lambda _: pytest.fail("a step"))
        return caught.value

    found = refused(BudgetError, r"3.png \(120×96\) takes up to .* of 10.0 MiB", budget="10MiB")
    assert found.smallest > 10 << 20
    refused(
        UsageError, "too small for val.metrics.lpips, which needs 111", metric={"crop_border": 40}
    )


@pytest.mark.parametrize("metric", [{"type": "psnr"}, {"type": "ssim", "crop_border": 43}])
def test_borders_that_leave_nothing_of_an_image_are_named(photos, tmp_path, metric):
    given = plain(photos, val={"metrics": {"one": {"crop_border": 48, **metric}}})
    with pytest.raises(UsageError, match=r"3\.png: 120×96 is too small for val.metrics.one, which"):
        train_sr(
            SrConfig.from_values(given), tmp_path, on_step=lambda _: pytest.fail("a step was taken")
        )


_RUN = """
import sys
from lowtide.jobs.upscale.train import make_sr_task, train_sr
from lowtide.training.distributed import SINGLE_PROCESS
train_sr(sys.argv[1], sys.argv[2], on_step=lambda moment: print(moment.step, flush=True))
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_with_the_same_losses(photos, tmp_path):
    config = tmp_path / "c.yml"
    config.write_text(yaml.safe_dump(plain(photos, total=40)))
    # All in processes of their own: sums round by how many threads there are.
    killed, whole = (
        [sys.executable, "-c", _RUN, str(config), str(tmp_path / name)]
        for name in ("killed", "whole")
    )
    process = subprocess.Popen(killed, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 7:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    states = tmp_path / "killed/mine/training_states"
    assert any(path.suffix == ".state" for path in states.iterdir())
    again = subprocess.run(killed, check=True, capture_output=True, text=True)
    assert int(again.stdout.split()[0]) >= 7
    subprocess.run(whole, check=True, capture_output=True)
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")


def test_a_damaged_state_is_passed_over_and_that_is_said(photos, tmp_path):
    given = plain(photos)
    whole = train_sr(SrConfig.from_values(given), tmp_path / "whole")
    train_sr(SrConfig.from_values(given), tmp_path / "torn")
    newest = tmp_path / "torn/mine/training_states/6.state"
    newest.write_bytes(newest.read_bytes()[:-1000])
    said = []
    report = train_sr(SrConfig.from_values(given), tmp_path / "torn", on_warning=said.append)
    assert (report.resumed_step, report.steps) == (4, 6)
    assert said == report.warnings
    assert "6.state is damaged" in said[0]
    assert "the state of step 4 was loaded" in said[0]
    assert rows_of(tmp_path / "torn") == rows_of(tmp_path / "whole")
    assert Path(report.weights).read_bytes() == Path(whole.weights).read_bytes()


@pytest.fixture
def growing(photos, tmp_path):
    """A folder of pictures that a training has begun with, and its configuration."""
    folder = tmp_path / "growing"
    shutil.copytree(photos / "train/hr", folder)
    given = plain(photos, total=4)
    given["datasets"] = {"train": {**given["datasets"]["train"], "dataroot_gt": str(folder)}}
    train_sr(SrConfig.from_values(given), tmp_path)
    given["train"]["total_iter"] = 6
    return folder, SrConfig.from_values(given)


def test_changed_images_are_named_or_accepted(growing, photos, tmp_path):
    folder, config = growing
    shutil.copy(photos / "val/hr/3.png", folder / "new.png")
    (folder / "0.png").unlink()
    shutil.copy(photos / "val/hr/3.png", folder / "1.png")
    words = r"1 new \(.*new.png\), 1 removed \(.*0.png\), 1 changed \(.*1.png\)"
    with pytest.raises(UsageError, match=words) as caught:
        train_sr(config, tmp_path, on_step=lambda _: pytest.fail("a step was taken"))
    assert "--accept-changed-data" in caught.value.hint
    report = train_sr(config, tmp_path, accept_changed_data=True)
    assert (report.resumed_step, report.steps) == (4, 6)
    assert len(report.warnings) == 1
    assert "continues with other files than before: 1 new" in report.warnings[0]
    # From here on these are its pictures.
    assert not train_sr(config, tmp_path).warnings


def test_rewritten_images_are_reported_and_training_goes_on(growing, tmp_path):
    folder, config = growing
    picture = folder / "2.png"
    os.utime(picture, ns=(1, picture.stat().st_mtime_ns + 10**9))
    report = train_sr(config, tmp_path)
    assert report.steps == 6
    assert "1 rewritten" in report.warnings[0]
    assert str(picture) in report.warnings[0]


def planned(photos, budget, device="cpu", network="paragonsr2_s", **changes):
    """The plan of a step of a network."""
    given = plain(photos, network_g=network if isinstance(network, dict) else {"type": network})
    given["train"] |= changes.pop("train", {})
    config = SrConfig.from_values(given | changes)
    return plan_step(config, make_sr_task(config, SINGLE_PROCESS), budget, device)


def test_the_budget_splits_the_batch(photos):
    whole = planned(photos, 1 << 40)
    assert (whole.batch, whole.micro_batches, whole.samples) == (4, 1, "patches of 16 px")
    cut = planned(photos, int(whole.upper_bytes * 0.8))
    assert cut.micro_batches in (2, 4)
    assert cut.upper_bytes <= 0.8 * whole.upper_bytes
    with pytest.raises(BudgetError, match="no step fits") as caught:
        planned(photos, 4 << 20)
    least = planned(photos, caught.value.smallest)
    assert least.upper_bytes <= caught.value.smallest


def test_a_step_is_planned_for_an_absent_gpu(photos):
    plan = planned(photos, 12 << 30, "rtx3060-12gb", "paragonsr2_nano")
    here = planned(photos, 12 << 30, network="paragonsr2_nano")
    assert plan.predicted_bytes > here.predicted_bytes  # the driver's context


def test_checkpointing_takes_less_and_a_discriminator_more(photos):
    network = {"type": "paragonsr2_m", "groups": 2, "blocks": 3}
    judge = {"type": "munet", "features": 16, "widths": [1, 2]}
    alone, less, more = (
        planned(photos, 1 << 40, network=network, **changes).predicted_bytes
        for changes in (
            {},
            {"train": {"checkpointing": "full"}},
            {"network_d": judge, "train": {"losses": [{"type": "l1"}, {"type": "ganloss"}]}},
        )
    )
    assert less < 0.8 * alone
    assert more > alone


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda given: given["datasets"]["train"].update(lq_size=64), InputError, "128 x 128"),
        (
            lambda given: given["datasets"]["train"].update(dataroot_lq="val/lr"),
            InputError,
            "0.png",
        ),
        (lambda given: given["datasets"]["train"].update(dataroot_gt="none"), InputError, "none"),
        (lambda given: given.update(precision="fp16"), UsageError, "GPU"),
        (lambda given: given.update(network_g={"type": "paragonsr2_nno"}), UsageError, "nno"),
        (
            lambda given: given.update(path={"pretrain_network_g": "lowtide-x4"}),
            UsageError,
            "another network",
        ),
    ],
)
def test_impossible_settings_are_refused_before_the_first_step(
    photos, tmp_path, monkeypatch, change, error, words
):
    monkeypatch.chdir(photos)
    given = plain(photos)
    change(given)
    with pytest.raises(error, match=words):
        train_sr(
            SrConfig.from_values(given), tmp_path, on_step=lambda _: pytest.fail("a step was taken")
        )


def test_begins_with_weights_of_a_file(photos, tmp_path):
    first = train_sr(SrConfig.from_values(plain(photos)), tmp_path / "a")
    given = plain(photos, path={"pretrain_network_g": first.weights})
    given["train"]["optim_g"] = {"lr": 1e-9}
    second = train_sr(SrConfig.from_values(given), tmp_path / "b")
    assert second.scores["psnr"] == pytest.approx(first.scores["psnr"], abs=0.02)
