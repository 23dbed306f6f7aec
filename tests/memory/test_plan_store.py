"""What was found out on this machine, kept between runs: bounded, checked, and never a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.memory import plan_store
from lowtide.memory.plan_store import JsonCache, JsonCacheTable, cache_folder, machine_facts

VALUE = {"error": 1e-7, "operators": "ab" * 20}


@pytest.fixture
def store(tmp_path):
    return JsonCache(tmp_path)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def entry(tmp_path):
    (path,) = (tmp_path / "plans").iterdir()
    return path


def test_round_trip(store, tmp_path):
    assert store.get("proof", "a", 1) is None
    store.put("proof", "a", 1, value=VALUE)
    assert store.get("proof", "a", 1) == JsonCache(tmp_path).get("proof", "a", 1) == VALUE
    assert store.get("proof", "a", "1") is None
    assert store.get("bands", "a", 1) is None
    assert entry(tmp_path).name.startswith("proof-")


def test_no_flipped_bit_is_believed(store, tmp_path):
    store.put("proof", value=VALUE)
    path = entry(tmp_path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for flip in (1, 128):
            damaged = bytearray(whole)
            damaged[place] ^= flip
            path.write_bytes(damaged)
            assert store.get("proof") is None
    path.write_bytes(whole)
    assert store.get("proof") == VALUE


def test_no_part_of_a_file_is_believed(store, tmp_path):
    store.put("proof", value=VALUE)
    path = entry(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert store.get("proof") is None
    path.write_bytes(whole + b"\n")
    assert store.get("proof") is None
    store.put("proof", value=VALUE)
    assert store.get("proof") == VALUE


@pytest.mark.parametrize("text", [b"", b"{}", b'{"error": 0.0}', b"\n", b"\xff\xfe\x00", b"[]\n[]"])
def test_other_content_is_not_believed(store, tmp_path, text):
    store.put("proof", value=VALUE)
    entry(tmp_path).write_bytes(text)
    assert store.get("proof") is None
    assert JsonCacheTable("proof", folder=tmp_path).get("error") is None


def test_a_file_under_the_name_of_another_is_not_believed(store, tmp_path):
    store.put("proof", 1, value=VALUE)
    path = entry(tmp_path)
    whole = path.read_bytes()
    store.put("proof", 2, value={})
    (other,) = (one for one in (tmp_path / "plans").iterdir() if one != path)
    other.write_bytes(whole)
    assert store.get("proof", 2) is None


def test_what_another_package_stored_is_not_found(store, monkeypatch):
    store.put("proof", value=VALUE)
    monkeypatch.setattr(plan_store, "package_digest", lambda: "another")
    assert store.get("proof") is None


def test_a_table_keeps_what_others_saved_meanwhile(tmp_path):
    one, other = (JsonCacheTable("operators", "m", folder=tmp_path) for _ in range(2))
    one.put("a", 1)
    other.put("b", 2)
    assert (one.get("a"), one.get("b")) == (1, None)
    one.save()
    other.save()
    read = JsonCacheTable("operators", "m", folder=tmp_path)
    assert (read.get("a"), read.get("b"), read.get("c")) == (1, 2, None)


def test_what_was_not_used_for_longest_is_dropped(store, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_store, "_MOST_FILES", 4)
    for number in range(4):
        store.put("graph", number, value=number)
        # As if some time passed between them.
        for path in (tmp_path / "plans").iterdir():
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    assert store.get("graph", 0) == 0  # and so it is used
    store.put("graph", 4, value=4)
    assert [store.get("graph", number) for number in range(5)] == [0, None, 2, 3, 4]


def test_many_bytes_are_dropped_too(store, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_store, "_MOST_BYTES", 1000)
    for number in range(50):
        store.put("graph", number, value=number)
    assert sum(path.stat().st_size for path in (tmp_path / "plans").iterdir()) <= 1000
    assert store.get("graph", 49) == 49


def test_files_of_others_are_left_alone(store, tmp_path, monkeypatch):
    """The folder may be one of a user."""
    monkeypatch.setattr(plan_store, "_MOST_FILES", 1)
    kept = ["residuals.jsonl", "notes.json", "operators-mine.json", "graph-old.json", "model.pth"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "mine.json").write_text("mine")
    (tmp_path / "plans" / "folder").mkdir()
    for number in range(3):
        store.put("graph", number, value=number)
    assert names(tmp_path) == sorted([*kept, "plans"])
    assert len(names(tmp_path / "plans")) == 3


def test_what_0_2_left_is_removed_once(store, tmp_path):
    two = "0123456789abcdef-0123456789abcdef"
    left = [
        "0123456789abcdef01234567.json",
        "library-memory.json",
        "operators-0123456789abcdef.json",
        "clock-ratios-0123456789abcdef.json",
        "certificate-0123456789abcdef01234567.json",
        "apart-0123456789abcdef01234567.json",
        f"bands-0123456789abcdef{two}.json",
        f"graph-0123456789abcdef01234567-{two[:16]}.json",
        f"passed-over-{two}.json",
        f"beside-{two}.json",
        "residuals-0123456789abcdef.jsonl",
    ]
    for name in [*left, "mine.json", "tensorrt"]:
        (tmp_path / name).write_text("")
    store.put("proof", value=VALUE)
    assert names(tmp_path) == ["mine.json", "plans", "tensorrt"]
    (tmp_path / left[0]).write_text("")
    store.put("proof", value=VALUE)
    assert left[0] in names(tmp_path)


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("a regular file")
    store = JsonCache(tmp_path / "file" / "below")
    store.put("proof", value=VALUE)
    assert store.get("proof") is None
    table = JsonCacheTable("operators", folder=tmp_path / "file")
    table.put("a", 1)
    table.save()
    assert table.get("a") == 1


def test_a_folder_that_can_only_be_read_is_read(store, monkeypatch):
    store.put("proof", value=VALUE)

    def refuse(*_args):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert store.get("proof") == VALUE


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes as Unix has them")
def test_nothing_is_written_through_an_existing_link(store, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    store.put("proof", value=VALUE)
    path = entry(tmp_path)
    for plant in (lambda: path.symlink_to(theirs), lambda: os.mkfifo(path)):
        path.unlink()
        plant()
        assert store.get("proof") is None
        store.put("proof", value=VALUE)
        assert store.get("proof") == VALUE
    assert theirs.read_text() == "theirs"


WRITER = """
import sys
from pathlib import Path
from lowtide.memory import plan_store
plan_store._MOST_FILES = 20
store = plan_store.JsonCache(Path(sys.argv[1]))
for turn in range(60):
    for kind in ("graph", "bands"):
        store.put(kind, "both", value=[turn] * 1000)
        found = store.get(kind, "both")
        assert found is None or (len(found) == 1000 and len(set(found)) == 1), found
    store.put("proof", turn % 30, value=turn)
"""


def test_two_processes_write_at_once(store, tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for one in both:
        _, errors = one.communicate()
        assert one.returncode == 0, errors
    assert len(names(tmp_path / "plans")) <= 21
    assert store.get("graph", "both") in (None, [59] * 1000)


def test_facts_of_a_machine(monkeypatch):
    before = machine_facts()
    assert machine_facts("rtx3060-12gb") != before == machine_facts("cpu")
    monkeypatch.setattr(plan_store, "cpu_name", lambda: "another processor")
    assert machine_facts() != before


def test_where_it_is(monkeypatch, tmp_path):
    assert cache_folder() is not None
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("LOWTIDE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder().name == "lowtide"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder().is_absolute() and "relative" not in cache_folder().parts


def test_no_home_is_no_cache_and_no_error(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("LOWTIDE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None
    store, table = JsonCache(), JsonCacheTable("operators")
    store.put("proof", value=1)
    table.put("a", 1)
    table.save()
    assert store.get("proof") is None and table.get("a") == 1
