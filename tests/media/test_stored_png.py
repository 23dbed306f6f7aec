from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from lowtide.media.encode_pipeline import UncompressedPngWriter


def sink_of(file: io.BytesIO) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        file.write(data)

    return write


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_8_bit_images_are_valid_pngs(bands: int) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (70, 33, bands), dtype=np.uint8)
    file = io.BytesIO()
    png = UncompressedPngWriter(sink_of(file), 33, 70, bands, 8)
    for top in range(0, 70, 9):
        png.write_rows(rows[top : top + 9])
    png.finish()
    with Image.open(file) as image:
        image.load()
        assert np.array_equal(np.asarray(image).reshape(rows.shape), rows)


def test_16_bit_samples_are_big_endian() -> None:
    rows = np.arange(600, dtype=np.uint16).reshape(20, 30, 1) * 100
    file = io.BytesIO()
    png = UncompressedPngWriter(sink_of(file), 30, 20, 1, 16)
    png.write_rows(rows)
    png.finish()
    with Image.open(file) as image:
        assert np.array_equal(np.asarray(image), rows[..., 0])


def test_rows_are_written_at_once_and_little_is_held() -> None:
    sent = 0

    def count(data: bytes) -> None:
        nonlocal sent
        sent += len(data)

    rows = np.zeros((512, 8000, 3), np.uint8)
    png = UncompressedPngWriter(count, 8000, 5120, 3, 8)
    tracemalloc.start()
    for done in range(1, 11):
        png.write_rows(rows)
        assert sent > done * rows.nbytes - (1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
