"""Where a training writes: in its own folder, never over what is somebody else's."""

import os
import sys

import numpy as np
import pytest

import lowtide
from lowtide import OutputError, UsageError
from lowtide.core.atomic_file import new_part_name
from lowtide.jobs.upscale.train import train_sr
from lowtide.training.setup import make_generator, save_weights
from lowtide.training.tasks.sr_config import SrConfig


@pytest.fixture
def config(tmp_path, save):
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 3), np.uint8)
    save(tmp_path / "photos" / "a.png", noise)
    return SrConfig.from_values(
        {
            "name": "mine",
            "scale": 2,
            "datasets": {
                "train": {
                    "dataroot_gt": str(tmp_path / "photos"),
                    "lq_size": 8,
                    "batch_size_per_gpu": 2,
                },
                "val": {"dataroot_gt": str(tmp_path / "photos")},
            },
            "network_g": {"type": "paragonconv", "features": 8, "blocks": 1},
            "train": {"total_iter": 2},
            "val": {"val_freq": 2},
        }
    )


@pytest.mark.parametrize(
    "name", ["config.json", "log.jsonl", "mine.safetensors", "models/mine_best.safetensors"]
)
def test_files_not_from_a_training_are_left_alone(config, tmp_path, name):
    path = tmp_path / "runs" / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "mine"}')
    with pytest.raises(UsageError, match="already exists") as raised:
        train_sr(config, tmp_path / "runs")
    assert str(tmp_path / "runs" / "mine" / name.partition("/")[0]) in raised.value.message
    assert path.read_text() == '{"name": "mine"}'
    assert [one for one in (tmp_path / "runs").rglob("*") if one.is_file()] == [path]


def test_a_file_in_the_place_of_the_folder(config, tmp_path):
    (tmp_path / "mine").write_text("theirs")
    with pytest.raises(UsageError, match="mine is not a folder"):
        train_sr(config, tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="links as Unix has them")
def test_nothing_is_written_through_a_link(config, tmp_path):
    """Its own files may have become links since: what they lead to is left as it is."""
    train_sr(config, tmp_path)
    (tmp_path / "theirs").write_text("theirs")
    folder = tmp_path / "mine"
    names = ("mine.safetensors", "models/validated.safetensors", "validation/0_a.png")
    kept = (folder / "config.json").read_bytes()
    for name in names:
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "theirs")
    report = train_sr(config, tmp_path)
    assert report.resumed_step == 2
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (folder / "config.json").read_bytes() == kept
    assert not (folder / "validation/0_a.png").is_symlink()
    lowtide.load(report.weights)


def test_a_second_training_in_the_folder_is_refused(config, tmp_path):
    said = []

    def again(_event):
        with pytest.raises(OutputError, match=r"another job is writing into .*mine") as refused:
            train_sr(config, tmp_path)
        said.append(refused.value.hint)

    report = train_sr(config, tmp_path, on_step=again)
    assert report.steps == 2 and len(said) == 2
    assert not (tmp_path / "mine" / ".lowtide-lock").exists()
    # What a killed run leaves locks nothing.
    (tmp_path / "mine" / ".lowtide-lock").touch()
    assert train_sr(config, tmp_path).resumed_step == 2


@pytest.mark.skipif(sys.platform == "win32", reason="pipes as Unix has them")
@pytest.mark.parametrize("name", ["config.json", "log.jsonl", "mine.safetensors"])
def test_a_pipe_in_the_folder_ends_it_before_the_first_step(config, tmp_path, name):
    train_sr(config, tmp_path)
    path = tmp_path / "mine" / name
    path.unlink()
    os.mkfifo(path)
    steps = []
    longer = config.model_copy(update={"train": config.train.model_copy(update={"total_iter": 3})})
    with pytest.raises(OutputError, match="not a regular file"):
        train_sr(longer, tmp_path, on_step=steps.append)
    assert not steps and path.is_fifo()


def test_partial_files_of_killed_trainings_are_removed(config, tmp_path):
    train_sr(config, tmp_path)
    folder = tmp_path / "mine"
    left = [new_part_name(folder / name) for name in ("mine.safetensors", "config.json")]
    left.append(new_part_name(folder / "models" / "mine_best.safetensors"))
    theirs = [new_part_name(folder / "other.safetensors"), folder / ".mine.lowtide.part"]
    for path in left + theirs:
        path.write_text("half")
    train_sr(config, tmp_path)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in theirs)


def test_a_full_disk(config, tmp_path, files_of_at_most):
    network = make_generator(config.network_g, 2, seed=0)
    path = save_weights(tmp_path / "models" / "a.safetensors", network, config)
    before = path.read_bytes()
    full = pytest.raises(OutputError, match=r"a\.safetensors: the disk is full")
    with files_of_at_most(1000), full as raised:
        save_weights(path, network, config)
    assert "free some space" in raised.value.hint
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    full = pytest.raises(OutputError, match=r"config\.json: the disk is full")
    with files_of_at_most(50), full:
        train_sr(config, tmp_path)
    assert not (tmp_path / "mine").exists()
