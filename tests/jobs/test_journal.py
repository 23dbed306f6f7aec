"""The journal by itself: what counts as finished after any interruption."""

import json
import os
import stat
import subprocess
import sys

import pytest

from lowtide import OutputError
from lowtide.jobs.engine.journal import JOURNAL_NAME, JobJournal


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
    with JobJournal(tmp_path) as journal:
        journal.begin(target, "key")
        make(target)
        journal.done(target, "key")
    with JobJournal(tmp_path) as journal:
        assert journal.is_finished(target, "key")
        assert not journal.is_finished(target, "other")
        assert journal.owns(target)
        target.write_text("tampered")
        assert not journal.is_finished(target, "key")
        target.unlink()
        assert not journal.is_finished(target, "key")


def test_killed_between_the_name_and_the_record(tmp_path, target):
    journal = JobJournal(tmp_path)
    journal.begin(target, "key")
    make(target)
    die(journal)
    with JobJournal(tmp_path) as journal:
        assert not journal.is_finished(target, "other")
        assert journal.is_finished(target, "key")
    # And it is remembered with its content from now on.
    target.write_text("tampered")
    with JobJournal(tmp_path) as journal:
        assert not journal.is_finished(target, "key")


def test_killed_before_the_name(tmp_path, target):
    journal = JobJournal(tmp_path)
    journal.begin(target, "key")
    die(journal)
    with JobJournal(tmp_path) as journal:
        assert not journal.is_finished(target, "key")


def test_killed_before_replacing_an_old_file(tmp_path, target):
    make(target, "old")
    journal = JobJournal(tmp_path)
    journal.begin(target, "key")
    die(journal)
    with JobJournal(tmp_path) as journal:
        assert not journal.is_finished(target, "key")
        journal.begin(target, "key")
        make(target, "new")
        die(journal)
    with JobJournal(tmp_path) as journal:
        assert journal.is_finished(target, "key")


def test_an_unfinished_file_claims_nothing(tmp_path, target):
    with JobJournal(tmp_path) as journal:
        journal.begin(target, "key")
        journal.undo_begin(target)
    make(target, "somebody else's")
    with JobJournal(tmp_path) as journal:
        assert not journal.is_finished(target, "key")
        assert not journal.owns(target)


def test_the_latest_record_counts(tmp_path, target):
    journal = JobJournal(tmp_path)
    for key in ("first", "second"):
        journal.begin(target, key)
        make(target, key)
        journal.done(target, key)
    die(journal)
    with JobJournal(tmp_path) as journal:
        assert not journal.is_finished(target, "first")
        assert journal.is_finished(target, "second")


def test_closing_keeps_only_what_counts(tmp_path, target):
    for _ in range(3):
        with JobJournal(tmp_path) as journal:
            journal.set_pin({"versions": 1})
            journal.begin(target, "key")
            make(target)
            journal.done(target, "key")
    lines = [json.loads(line) for line in (tmp_path / JOURNAL_NAME).read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["pin", "done"]
    assert lines[1]["done"] == "sub/a.png"


@pytest.mark.parametrize("cut", [1, 7, 25])
def test_a_torn_line_costs_only_itself(tmp_path, target, cut):
    journal = JobJournal(tmp_path)
    journal.set_pin({"device_bytes": 5})
    make(target)
    journal.done(target, "key")
    die(journal)
    path = tmp_path / JOURNAL_NAME
    path.write_text(path.read_text()[:-cut])
    journal = JobJournal(tmp_path)
    # A line that lacks only its end is whole.
    assert journal.is_finished(target, "key") == (cut == 1)
    journal.set_pin({"device_bytes": 6})
    die(journal)
    with JobJournal(tmp_path) as journal:
        assert journal.pin == {"device_bytes": 6}


def test_foreign_lines_are_skipped(tmp_path):
    (tmp_path / JOURNAL_NAME).write_text('null\n[1]\n"pin"\n{"other": 1}\n{"pin": {"a": 1}}\n')
    with JobJournal(tmp_path) as journal:
        assert journal.pin == {"a": 1}


def test_one_journal_at_a_time(tmp_path):
    with JobJournal(tmp_path) as journal:
        journal.set_pin({"a": 1})
        with pytest.raises(OutputError, match="another job is writing"):
            JobJournal(tmp_path)
    JobJournal(tmp_path).close()


def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from lowtide.jobs.engine.journal import "
        "JobJournal;"
        "JobJournal(Path(sys.argv[1])).set_pin({'a': 1}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    with JobJournal(tmp_path) as journal:
        assert journal.pin == {"a": 1}


def test_an_empty_journal_leaves_no_trace(tmp_path):
    JobJournal(tmp_path / "new" / "folder").close()
    assert list(tmp_path.iterdir()) == []
    with JobJournal(tmp_path / "new") as journal:
        make(tmp_path / "new" / "file")
    journal.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_parts_of_killed_runs(tmp_path, target):
    """Those that the journal names go, and nothing else that is called like them."""
    make(target)
    theirs = [tmp_path / ".a.png.lowtide.part", target.parent / ".b.jpg.lowtide.part"]
    for path in theirs:
        path.write_bytes(b"theirs")
    journal = JobJournal(tmp_path)
    parts = [journal.new_part(target), journal.new_part(tmp_path / "b.png")]
    assert [path.parent for path in parts] == [target.parent, tmp_path]
    for path in parts:
        path.write_bytes(b"half")
    die(journal)
    with JobJournal(tmp_path) as journal:
        assert journal.remove_parts() == 2
    assert not any(path.exists() for path in parts)
    assert all(path.exists() for path in theirs)
    assert target.exists()
    assert not (tmp_path / JOURNAL_NAME).exists()  # there is nothing left to say


def test_a_journal_cannot_have_anything_else_removed(tmp_path):
    folder = tmp_path / "out"
    theirs = [tmp_path / ".x.lowtide.part", folder / "photo.png", folder / "sub"]
    (folder / "sub").mkdir(parents=True)
    for path in theirs[:2]:
        path.write_text("theirs")
    above = "../.x.lowtide.part"
    names = [above, f"a/../{above}", str(theirs[0]), "photo.png", "sub", ""]
    names += [".\0.lowtide.part", ".\ud800.lowtide.part"]
    lines = [json.dumps({"part": name}) for name in names]
    (folder / JOURNAL_NAME).write_text("\n".join(lines) + "\n")
    with JobJournal(folder) as journal:
        assert journal.remove_parts() == 0
    assert all(path.exists() for path in theirs)
    assert not (folder / JOURNAL_NAME).exists()


DAMAGED = [
    '{"pin": 5}',
    '{"begin": [1], "key": "a", "replaces": null}',
    '{"done": "a"}',
    '{"part": 1}',
    '{"begin": "a"}',
    "[" * 100_000,
    "\ud800",
    '{"pin": ',
    "9" * 5000,
    "\x00" * 4096,
]


def test_damaged_lines_are_skipped(tmp_path, target):
    for line in DAMAGED:
        with JobJournal(tmp_path) as journal:
            make(target)
            journal.done(target, "key")
        with (tmp_path / JOURNAL_NAME).open("ab") as file:
            file.write(line.encode("utf-8", "surrogatepass") + b"\n")
        with JobJournal(tmp_path) as journal:
            assert journal.is_finished(target, "key")


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    path = tmp_path / JOURNAL_NAME
    for content in (b"dear diary\n", b"\x89PNG\r\n\x1a\n"):
        path.write_bytes(content)
        with pytest.raises(OutputError, match="is not a journal"):
            JobJournal(tmp_path)
        assert path.read_bytes() == content


@pytest.mark.skipif(os.name == "nt", reason="links and pipes as Unix has them")
def test_nothing_is_written_through_a_link(tmp_path, target):
    """Lines were appended to what a link led to, and a pipe was waited for without end."""
    folder, theirs = tmp_path / "out", tmp_path / "theirs"
    folder.mkdir()
    path = folder / JOURNAL_NAME
    theirs.write_text("theirs\n")
    for plant in (
        lambda: path.symlink_to(theirs),
        lambda: path.symlink_to("nowhere"),
        lambda: os.mkfifo(path),
        path.mkdir,
    ):
        plant()
        with pytest.raises(OutputError, match=r"journal\.jsonl: cannot be written"):
            JobJournal(folder)
        path.rmdir() if path.is_dir() else path.unlink()
    assert theirs.read_text() == "theirs\n"
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="links and pipes as Unix has them")
def test_a_copy_by_links_keeps_its_journal(tmp_path):
    """As backups have them: a second name of the same file."""
    with JobJournal(tmp_path) as journal:
        journal.set_pin({"a": 1})
    (tmp_path / "backup").hardlink_to(tmp_path / JOURNAL_NAME)
    before = (tmp_path / "backup").read_text()
    with JobJournal(tmp_path) as journal:
        assert journal.pin == {"a": 1}
        journal.set_pin({"a": 2})
    assert (tmp_path / "backup").read_text() == before
    with JobJournal(tmp_path) as journal:
        assert journal.pin == {"a": 2}


FULL = """
import resource, sys
from pathlib import Path
from lowtide import OutputError
from lowtide.jobs.engine.journal import JobJournal
target = Path(sys.argv[1]) / "a.png"
journal = JobJournal(target.parent)
journal.set_pin({"a": 1})
target.write_text("result")
journal.done(target, "key")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    journal.set_pin({"a": "b" * 10_000})
except OutputError as error:
    print(error.message, "|", error.hint)
journal.close()
"""


@pytest.mark.skipif(os.name == "nt", reason="limits files as Unix does")
@pytest.mark.parametrize("most", [1, 300])
def test_a_full_disk_is_named_and_costs_nothing_that_was_noted(tmp_path, most):
    """What was held back for the next try was written when the journal was closed, and failed."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", FULL, str(tmp_path), str(most)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the disk is full" in done.stdout
    assert "free some space" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [JOURNAL_NAME, "a.png"]
    with JobJournal(tmp_path) as journal:
        assert journal.pin == {"a": 1}
        assert journal.is_finished(tmp_path / "a.png", "key")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(OutputError, match="Permission denied"):
            JobJournal(tmp_path)
    finally:
        tmp_path.chmod(stat.S_IRWXU)
