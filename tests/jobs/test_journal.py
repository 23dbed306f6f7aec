"""The journal by itself: what counts as finished after any interruption."""

import json
import os
import stat
import subprocess
import sys

import pytest

from lowtide.core.errors import OutputError
from lowtide.jobs.journal import JOURNAL_NAME, Journal


@pytest.fixture
def target(tmp_path):
    return tmp_path / "sub" / "a.png"


def make(path, text="result"):
    """A file that gets its name in one step, as outputs do."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name("draft")
    draft.write_text(text)
    draft.replace(path)



def die(journal):
    """What is left when a process ends without closing its journal: only the lines appended."""
    journal._file.close()


def test_done_is_finished_only_for_its_key_and_content(tmp_path, target):
    with Journal(tmp_path) as journal:
        journal.begin(target, "key")
        make(target)
        journal.done(target, "key")
    with Journal(tmp_path) as journal:
        assert journal.finished(target, "key")
        assert not journal.finished(target, "other")
        assert journal.owns(target)
        target.write_text("tampered")
        assert not journal.finished(target, "key")
        target.unlink()
        assert not journal.finished(target, "key")


def test_killed_between_the_name_and_the_record(tmp_path, target):
    journal = Journal(tmp_path)
    journal.begin(target, "key")
    make(target)
    die(journal)
    with Journal(tmp_path) as journal:
        assert not journal.finished(target, "other")
        assert journal.finished(target, "key")
    # And it is remembered with its content from now on.
    target.write_text("tampered")
    with Journal(tmp_path) as journal:
        assert not journal.finished(target, "key")


def test_killed_before_the_name(tmp_path, target):
    journal = Journal(tmp_path)
    journal.begin(target, "key")
    die(journal)
    with Journal(tmp_path) as journal:
        assert not journal.finished(target, "key")


def test_killed_before_replacing_an_old_file(tmp_path, target):
    make(target, "old")
    journal = Journal(tmp_path)
    journal.begin(target, "key")
    die(journal)
    with Journal(tmp_path) as journal:
        assert not journal.finished(target, "key")
        journal.begin(target, "key")
        make(target, "new")
        die(journal)
    with Journal(tmp_path) as journal:
        assert journal.finished(target, "key")


def test_what_could_not_be_finished_claims_nothing(tmp_path, target):
    with Journal(tmp_path) as journal:
        journal.begin(target, "key")
        journal.forget(target)
    make(target, "somebody else's")
    with Journal(tmp_path) as journal:
        assert not journal.finished(target, "key")
        assert not journal.owns(target)


def test_the_latest_record_counts(tmp_path, target):
    journal = Journal(tmp_path)
    for key in ("first", "second"):
        journal.begin(target, key)
        make(target, key)
        journal.done(target, key)
    die(journal)
    with Journal(tmp_path) as journal:
        assert not journal.finished(target, "first")
        assert journal.finished(target, "second")


def test_closing_keeps_only_what_counts(tmp_path, target):
    for _ in range(3):
        with Journal(tmp_path) as journal:
            journal.set_pin({"versions": 1})
            journal.begin(target, "key")
            make(target)
            journal.done(target, "key")
    lines = [json.loads(line) for line in (tmp_path / JOURNAL_NAME).read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["pin", "done"]
    assert lines[1]["done"] == "sub/a.png"


@pytest.mark.parametrize("cut", [1, 7, 25])
def test_a_torn_line_costs_only_itself(tmp_path, target, cut):
    journal = Journal(tmp_path)
    journal.set_pin({"device_bytes": 5})
    make(target)
    journal.done(target, "key")
    die(journal)
    path = tmp_path / JOURNAL_NAME
    path.write_text(path.read_text()[:-cut])
    journal = Journal(tmp_path)
    # A line that lacks only its end is whole.
    assert journal.finished(target, "key") == (cut == 1)
    journal.set_pin({"device_bytes": 6})
    die(journal)
    with Journal(tmp_path) as journal:
        assert journal.pin == {"device_bytes": 6}


def test_foreign_lines_are_skipped(tmp_path):
    (tmp_path / JOURNAL_NAME).write_text('null\n[1]\n"pin"\n{"other": 1}\n{"pin": {"a": 1}}\n')
    with Journal(tmp_path) as journal:
        assert journal.pin == {"a": 1}


def test_one_journal_at_a_time(tmp_path):
    with Journal(tmp_path) as journal:
        journal.set_pin({"a": 1})
        with pytest.raises(OutputError, match="another job is writing"):
            Journal(tmp_path)
    Journal(tmp_path).close()


def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from lowtide.jobs.journal import Journal;"
        "Journal(Path(sys.argv[1])).set_pin({'a': 1}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    with Journal(tmp_path) as journal:
        assert journal.pin == {"a": 1}


def test_an_empty_journal_leaves_no_trace(tmp_path):
    Journal(tmp_path / "new" / "folder").close()
    assert list(tmp_path.iterdir()) == []
    with Journal(tmp_path / "new") as journal:
        make(tmp_path / "new" / "file")
    journal.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_parts_of_killed_runs(tmp_path, target):
    make(target)
    for name in (".a.png.lowtide.part", "sub/.b.jpg.lowtide.part"):
        (tmp_path / name).write_bytes(b"half")
    with Journal(tmp_path) as journal:
        assert journal.remove_parts() == 2
    assert target.exists()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(OutputError, match="Permission denied"):
            Journal(tmp_path)
    finally:
        tmp_path.chmod(stat.S_IRWXU)
