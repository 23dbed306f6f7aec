"""Checkpoints of a training: complete or skipped, and never a reason to delete others."""

import pytest
import torch

from lowtide import InputError
from lowtide.training.state import TrainState, load_latest_state, save_state


def state_of(step):
    return TrainState(step, {"a": {"w": torch.full((64, 64), float(step))}}, best=1.5)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-300])


def nulled(path):
    """As a power cut may leave a file whose name was written before its bytes."""
    path.write_bytes(bytes(path.stat().st_size))


def changed_inside(path):
    """One bit of a weight, as disks lose them."""
    data = bytearray(path.read_bytes())
    data[data.find(torch.full((4,), 100.0).numpy().tobytes()) + 2] ^= 1
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


def test_the_last_two_are_kept(tmp_path):
    (tmp_path / ".0123456789abcdef.4.state.lowtide.part").write_bytes(b"what a killed run left")
    for step in (5, 20, 100):
        save_state(tmp_path, state_of(step))
    assert names_in(tmp_path) == ["100.state", "20.state"]
    state, damaged = load_latest_state(tmp_path)
    assert state is not None
    assert (state.step, state.best, damaged) == (100, 1.5, {})
    assert load_latest_state(tmp_path / "none") == (None, {})


@pytest.mark.parametrize("damage", [cut_short, nulled, changed_inside, emptied])
def test_a_damaged_one_is_passed_over_and_goes_with_the_next(tmp_path, damage):
    for step in (20, 100):
        save_state(tmp_path, state_of(step))
    damage(tmp_path / "100.state")
    state, damaged = load_latest_state(tmp_path)
    assert state is not None
    assert state.step == 20
    assert torch.equal(state.parts["a"]["w"], torch.full((64, 64), 20.0))
    assert list(damaged) == [tmp_path / "100.state"]
    # Or it would be the newest one for ever.
    save_state(tmp_path, state_of(40))
    assert names_in(tmp_path) == ["20.state", "40.state"]


def test_where_all_are_damaged_that_is_said(tmp_path):
    for step in (20, 100):
        save_state(tmp_path, state_of(step))
        nulled(tmp_path / f"{step}.state")
    with pytest.raises(
        InputError, match=r"100\.state cannot be read: .*; neither can the 1 before"
    ):
        load_latest_state(tmp_path)
    assert names_in(tmp_path) == ["100.state", "20.state"]


def test_nothing_is_written_where_a_link_leads(tmp_path):
    elsewhere = tmp_path / "mine.txt"
    elsewhere.write_text("mine")
    folder = tmp_path / "states"
    folder.mkdir()
    for name in ("5.state", ".5.state.lowtide.part"):
        (folder / name).symlink_to(elsewhere)
    save_state(folder, state_of(5))
    assert elsewhere.read_text() == "mine"
    assert not (folder / "5.state").is_symlink()
    state, _ = load_latest_state(folder)
    assert state is not None
    assert state.step == 5
