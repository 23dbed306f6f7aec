"""The log of a training: rows are whole, whatever happened to the file."""

import json
import os
import threading

import pytest

from lowtide import OutputError
from lowtide.training.train_log import TrainLog, read_log


def write(folder, *texts):
    (folder / "log.jsonl").write_bytes(b"".join(texts))


def row(step, **more):
    return json.dumps({"step": step, **more}).encode() + b"\n"


def steps_of(folder):
    return [one["step"] for one in read_log(folder)]


TORN = {
    "cut": [row(1), row(2), row(3)[:7]],
    "cut in a character": [row(1), row(2), '{"step": 3, "ä'.encode()[:-1]],
    "nulls": [row(1), row(2), bytes(4096)],
    "glued": [row(1), row(3)[:7] + row(3), row(2)],  # as a run before had left it
    "no row": [row(1), b"3\n", b'{"step": "3"}\n', row(2)],
}


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_log_is_truncated_to_whole_rows(tmp_path, torn):
    write(tmp_path, *TORN[torn])
    assert steps_of(tmp_path) == [1, 2]
    log = TrainLog(tmp_path, 2)
    log.add(3, {"l1loss": 0.5})
    log.close()
    assert (tmp_path / "log.jsonl").read_bytes() == row(1) + row(2) + row(3, l1loss=0.5)


def test_a_last_row_without_its_end_counts(tmp_path):
    write(tmp_path, row(1), row(2)[:-1])
    log = TrainLog(tmp_path, 2)
    log.add(3, {})
    log.close()
    assert steps_of(tmp_path) == [1, 2, 3]


def test_rows_beyond_what_is_done_go_and_others_stay_as_they_were(tmp_path):
    first = b'{"step":1,  "l1loss": 0.10}\n'
    write(tmp_path, first, row(2), row(3))
    TrainLog(tmp_path, 2).close()
    assert (tmp_path / "log.jsonl").read_bytes() == first + row(2)
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_partial_logs_of_a_killed_run_are_removed(tmp_path):
    left = tmp_path / ".0123456789abcdef.log.jsonl.lowtide.part"
    other = tmp_path / ".mine.log.jsonl.lowtide.part"
    for path in (left, other):
        path.write_bytes(row(1))
    TrainLog(tmp_path, 0).close()
    assert not left.exists()
    assert other.exists()


def test_nothing_is_written_where_a_link_leads(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_bytes(row(9))
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").symlink_to(mine)
    with pytest.raises(OutputError, match=r"log\.jsonl: .*it is a symbolic link"):
        TrainLog(run, 0)
    (run / "log.jsonl").unlink()
    os.link(mine, run / "log.jsonl")
    log = TrainLog(run, 9)
    log.add(10, {})
    log.close()
    assert mine.read_bytes() == row(9)
    assert steps_of(run) == [9, 10]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_log_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    found = []

    def begin():
        with pytest.raises(OutputError, match="it is not a regular file"):
            TrainLog(tmp_path, 0)
        found.append(True)

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(20)
    assert found
