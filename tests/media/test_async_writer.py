"""Rows written by a thread: the same file, bounded memory, and nothing lost or left behind."""

import threading

import numpy as np
import pytest

from lowtide import OutputError
from lowtide.media import AsyncSink, ImageSink, open_image, open_sink
from lowtide.media import async_writer as module
from lowtide.media.image_info import ImageInfo

INFO = ImageInfo(60, 50, 3)


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (50, 60, 3), np.uint8)


def behind(path, most=1 << 20):
    return AsyncSink(open_sink(path, INFO), most)


def test_the_file_is_the_same_whoever_writes_it(tmp_path, pixels):
    with open_sink(tmp_path / "a.png", INFO) as plain:
        plain.write(0, pixels)
        plain.commit()
    with behind(tmp_path / "b.png") as sink:
        buffer = np.empty((7, 60, 3), np.uint8)  # used again for every strip, as a merger does
        for top in range(0, 50, 7):
            rows = pixels[top : top + 7]
            buffer[: len(rows)] = rows
            sink.write(top, buffer[: len(rows)])
        buffer[:] = 0
        assert sink.commit() == tmp_path / "b.png"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with open_image(tmp_path / "b.png") as image:
        assert np.array_equal(image.read(0, 50), pixels)


def test_no_more_rows_wait_than_allowed(tmp_path, pixels, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 60 * 3 * 5)
    gate, write = threading.Event(), ImageSink.write

    def gated(self, first, values):
        assert gate.wait(20)
        write(self, first, values)

    monkeypatch.setattr(ImageSink, "write", gated)
    sink = behind(tmp_path / "a.png", most=60 * 3 * 20)
    giving = threading.Thread(target=sink.write, args=(0, pixels), daemon=True)
    giving.start()
    giving.join(0.3)
    assert giving.is_alive()
    assert sink._queued_bytes == 60 * 3 * 20
    gate.set()
    giving.join(20)
    assert sink.commit().exists()


def test_it_has_no_name_before_it_is_committed(tmp_path, pixels):
    sink = behind(tmp_path / "a.png")
    sink.write(0, pixels)
    sink.close_rows()
    sink._thread.join(20)
    assert not (tmp_path / "a.png").exists()
    sink.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("closed", [False, True])
def test_aborting_leaves_nothing(tmp_path, pixels, closed):
    sink = behind(tmp_path / "new" / "a.png")
    sink.write(0, pixels)
    if closed:
        sink.close_rows()
        sink._thread.join(20)
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_told_to_who_writes_next_and_at_the_end(tmp_path, pixels, monkeypatch):
    def full(self, first, values):
        raise OutputError("the disk is full")

    monkeypatch.setattr(ImageSink, "write", full)
    with behind(tmp_path / "a.png", most=1) as sink:
        sink.write(0, pixels[:1])
        sink._thread.join(20)
        with pytest.raises(OutputError, match="full"):
            sink.write(1, pixels[1:2])
        with pytest.raises(OutputError, match="full"):
            sink.commit()
    assert list(tmp_path.iterdir()) == []


def test_missing_rows_are_an_error(tmp_path, pixels):
    with behind(tmp_path / "a.png") as sink:
        sink.write(0, pixels[:20])
        with pytest.raises(OutputError, match="20 of 50 rows"):
            sink.commit()
    assert list(tmp_path.iterdir()) == []
