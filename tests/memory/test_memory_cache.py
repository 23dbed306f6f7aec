"""Measurements kept between runs."""

import os
import sys

import pytest

from lowtide.core import heap
from lowtide.memory.cache import CostCache
from lowtide.memory.costs import ModelCosts

COSTS = ModelCosts.model_validate(
    {
        "sha256": "ab",
        "device": "cpu",
        "precision": "fp32",
        "weight_bytes": 10,
        "channels_last": False,
        "batchable": True,
        "receptive_field": None,
        "receptive_field_search_limit": 31,
        "points": [
            {"pixels": n, "peak_bytes": 9 * n, "resident_bytes": 10 * n, "seconds": 0.1 * n}
            for n in (100, 400)
        ],
    }
)


def test_round_trip(tmp_path):
    store = CostCache(tmp_path / "new")
    assert store.get("key") is None
    store.put("key", COSTS)
    assert store.get("key") == COSTS
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["key.json"]


@pytest.mark.parametrize("text", ["", "{", '{"sha256": "ab"}', "[]"])
def test_a_damaged_file_is_measured_again(tmp_path, text):
    store = CostCache(tmp_path)
    (tmp_path / "key.json").write_text(text)
    assert store.get("key") is None
    store.put("key", COSTS)
    assert store.get("key") == COSTS


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "key.json").write_bytes(b"\xff\xfe\x00")
    assert CostCache(tmp_path).get("key") is None


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("a regular file")
    store = CostCache(tmp_path / "file" / "below")
    store.put("key", COSTS)
    assert store.get("key") is None


def test_keys_differ_by_what_changes_costs(monkeypatch):
    store = CostCache()
    keys = {
        store.key("ab", "cpu", "fp32"),
        store.key("ac", "cpu", "fp32"),
        store.key("ab", "cpu", "bf16"),
    }
    monkeypatch.setattr(heap, "_tuned", not heap._tuned)
    keys.add(store.key("ab", "cpu", "fp32"))
    monkeypatch.setattr("lowtide.memory.cache.cpu_name", lambda: "another processor")
    keys.add(store.key("ab", "cpu", "fp32"))
    assert len(keys) == 5


def test_costs_that_lack_a_fact_are_not_found(monkeypatch):
    before = CostCache().key("ab", "cpu", "fp32")

    class MoreCosts(ModelCosts):
        new: int = 0

    monkeypatch.setattr("lowtide.memory.cache.ModelCosts", MoreCosts)
    assert CostCache().key("ab", "cpu", "fp32") != before


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes as Unix has them")
def test_nothing_is_written_through_an_existing_link(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / "key.json").symlink_to(theirs)
    os.mkfifo(tmp_path / "pipe.json")
    # The name that unfinished files of this process had.
    (tmp_path / f"key.{os.getpid()}.part").symlink_to(theirs)
    store = CostCache(tmp_path)
    for key in ("key", "pipe"):
        assert store.get(key) is None
        store.put(key, COSTS)
        assert store.get(key) == COSTS
    assert theirs.read_text() == "theirs"
