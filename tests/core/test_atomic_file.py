"""Files that appear whole or not at all, and never through a link."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowtide import OutputError, UsageError
from lowtide.core.atomic_file import (
    PART_PATTERN,
    append_synced,
    atomic_output,
    atomic_write,
    create_new_file,
    new_part_name,
    open_for_append,
    part_path,
    put_in_place,
    require_distinct,
    require_output,
    write_error,
)

links = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes as Unix has them")


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    with atomic_write(target) as part:
        assert part.read_bytes() == b""
        part.write_text("new")
        assert target.read_text() == "old"
        assert list(tmp_path.glob(PART_PATTERN)) == [part]
        assert part in tmp_path.glob(part_path(tmp_path / "*.json").name)
    assert target.read_text() == "new"
    assert left_in(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_old_file_stays_when_the_block_fails(tmp_path, error):
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(error), atomic_write(target) as part:
        part.write_text("half")
        raise error
    assert target.read_text() == "old"
    assert left_in(tmp_path) == ["a.json"]


def test_a_file_is_for_those_whom_the_user_lets_read_whatever_wrote_it(tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "weights") as part:
        save_file({"a": torch.zeros(3)}, part)  # readable by its owner alone
    modes = {(tmp_path / name).stat().st_mode for name in ("plain", "weights")}
    assert len(modes) == 1


def test_a_file_that_cannot_be_renamed_leaves_no_other_file(tmp_path):
    target = tmp_path / "a.json"
    target.mkdir()
    with pytest.raises(OSError), atomic_write(target) as part:
        part.write_text("new")
    assert left_in(tmp_path) == ["a.json"]


def test_the_error_of_the_block_is_raised_where_nothing_was_written(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "none" / "a.json") as part:
        part.write_text("new")
    missing = pytest.raises(OutputError, match=r"a\.json: cannot be written \(No such file")
    with missing, atomic_output(tmp_path / "none" / "a.json") as part:
        part.write_text("new")


def test_parts_of_one_file_have_names_of_their_own(tmp_path):
    target = tmp_path / ("ü" * 120 + ".png")  # 244 bytes
    with atomic_write(target) as one, atomic_write(target) as other:
        one.write_text("first")
        other.write_text("second")
    assert target.read_text() == "first"
    assert left_in(tmp_path) == [target.name]


@links
def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    target = tmp_path / "a.json"
    target.symlink_to("theirs")
    with atomic_output(target) as part:
        part.write_text("new")
    assert not target.is_symlink()
    assert target.read_text() == "new"
    assert (tmp_path / "theirs").read_text() == "theirs"


@links
def test_nothing_that_is_there_is_opened_for_a_part(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    taken = [new_part_name(tmp_path / "a.png") for _ in range(4)]
    taken[0].symlink_to("theirs")
    taken[1].symlink_to("nowhere")
    taken[2].hardlink_to(tmp_path / "theirs")
    os.mkfifo(taken[3])
    for path in taken:
        with pytest.raises(FileExistsError):
            create_new_file(path)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("number", "words", "hinted"),
    [
        (errno.ENOSPC, "the disk is full", True),
        (errno.EFBIG, "the disk is full \\(largest file size reached", True),
        (errno.EIO, "cannot be written", False),
    ],
)
def test_errors_name_space_where_it_is_that(tmp_path, number, words, hinted):
    path = tmp_path / "a.json"
    with (
        pytest.raises(OutputError, match=rf"a\.json: {words}") as raised,
        atomic_output(path) as part,
    ):
        part.write_text("half")
        raise OSError(number, os.strerror(number))
    assert (raised.value.hint is not None) == hinted
    assert str(write_error(path, OSError(number, os.strerror(number)))) == str(raised.value)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("has_links", [True, False])
def test_what_appeared_meanwhile_stays_unless_it_may_be_replaced(tmp_path, monkeypatch, has_links):
    def refuse(*_names):
        raise PermissionError(errno.EPERM, "as on a memory card")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "a.json"
    with atomic_output(target, replace=False) as part:
        part.write_text("mine")
    assert target.read_text() == "mine" and left_in(tmp_path) == ["a.json"]
    with (
        pytest.raises(OutputError, match=r"a\.json: made by another program"),
        atomic_output(target, replace=False) as part,
    ):
        part.write_text("mine")
        target.write_text("theirs")
    assert target.read_text() == "theirs" and left_in(tmp_path) == ["a.json"]
    with atomic_output(target) as part:
        part.write_text("mine again")
    assert target.read_text() == "mine again"


@links
def test_only_files_and_links_to_them_are_replaced(tmp_path):
    pipe, link, folder, part = (tmp_path / name for name in ("pipe", "link", "folder", "part"))
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    folder.mkdir()
    part.write_text("mine")
    before = left_in(tmp_path)
    for path in (pipe, link, folder):
        for may_replace in (True, False):
            with pytest.raises((OutputError, OSError)):
                put_in_place(part, path, replace=may_replace)
        with pytest.raises(OutputError), atomic_output(path):
            raise AssertionError("begun")
        with pytest.raises(OutputError):
            require_output(path, force=True)
    assert left_in(tmp_path) == before and pipe.is_fifo() and link.is_symlink()
    (tmp_path / "nowhere").symlink_to("missing")
    put_in_place(part, tmp_path / "nowhere", replace=True)
    assert not (tmp_path / "nowhere").is_symlink()


@pytest.mark.skipif(sys.platform != "linux", reason="has the links of Linux")
def test_a_link_of_the_machine_is_not_replaced_whatever_it_leads_to():
    with pytest.raises(OutputError, match="not a regular file"):
        require_output(Path("/dev/stdout"), force=True)  # which looks, and writes nothing


@links
def test_a_folder_without_permission_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_given: False)  # root may write everywhere
    for makes_folder in (False, True):
        with pytest.raises(OutputError, match="Permission denied"):
            require_output(tmp_path / "a.json", force=False, makes_folder=makes_folder)


LIMITED = """
import resource, sys
from pathlib import Path
from lowtide import OutputError
from lowtide.core.atomic_file import atomic_output
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with atomic_output(Path(sys.argv[1])) as part:
        try:
            part.write_bytes(bytes(5000))
        except OSError:
            raise RuntimeError("a library's own words")
except OutputError as error:
    print(error.message, "|", error.hint)
"""


@links
def test_a_full_disk_is_recognized_where_a_library_hides_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-B", "-c", LIMITED, str(tmp_path / "a")], capture_output=True, text=True
    )
    assert "a: the disk is full" in done.stdout, done.stderr
    assert "free some space" in done.stdout
    assert left_in(tmp_path) == []
    with pytest.raises(RuntimeError, match="own words"), atomic_output(tmp_path / "a"):
        raise RuntimeError("a library's own words")


def test_lines_are_appended(tmp_path):
    path = tmp_path / "log"
    for line in ("one\n", "two\n"):
        descriptor = open_for_append(path)
        append_synced(descriptor, line)
        os.close(descriptor)
    assert path.read_text() == "one\ntwo\n"


@links
def test_only_a_file_is_appended_to(tmp_path):
    (tmp_path / "theirs").write_text("theirs\n")
    (tmp_path / "link").symlink_to("theirs")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "folder", "pipe"):
        with pytest.raises(OSError):
            open_for_append(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "second").hardlink_to(tmp_path / "theirs")
    descriptor = open_for_append(tmp_path / "second")
    append_synced(descriptor, "ours\n")
    os.close(descriptor)
    assert (tmp_path / "second").read_text() == "theirs\nours\n"
    assert (tmp_path / "theirs").read_text() == "theirs\n"


APPENDED = """
import os, resource, sys
from pathlib import Path
from lowtide.core.atomic_file import append_synced, open_for_append
descriptor = open_for_append(Path(sys.argv[1]))
append_synced(descriptor, "whole\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    append_synced(descriptor, "x" * 5000)
except OSError as error:
    print(error.errno)
"""


@links
def test_a_line_is_on_the_disk_whole_or_not_at_all(tmp_path):
    done = subprocess.run(
        [sys.executable, "-B", "-c", APPENDED, str(tmp_path / "a")], capture_output=True, text=True
    )
    assert done.stdout == f"{errno.EFBIG}\n", done.stderr
    assert (tmp_path / "a").read_text() == "whole\n"


def test_many_at_once(tmp_path):
    """Whoever comes last wins; nobody sees another's half."""
    target = tmp_path / "a"

    def write(letter):
        for _ in range(20):
            with atomic_write(target) as part:
                part.write_text(letter * 1000)
            assert len(set(target.read_text())) == 1

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left_in(tmp_path) == ["a"]


def test_an_output_that_is_an_input_or_another_output_is_refused(tmp_path):
    table, made, other = (tmp_path / name for name in ("table.csv", "made.csv", "other.csv"))
    table.write_text("")
    require_distinct([made, other], [table])
    for outputs, inputs, words in (
        ([made, tmp_path / "TABLE.csv"], [table], "is the input"),
        ([tmp_path / "x" / ".." / "table.csv"], [table], "is the input"),
        ([made, made], [table], "is the output"),
    ):
        with pytest.raises(UsageError, match=words):
            require_distinct(outputs, inputs)
