"""An image format is added from outside by one call, and is read, planned and written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import pyvips

import lowtide
from lowtide.media import FORMATS, ImageFormat, add_format, inspect_image


def save_vips(image, name, options, details):
    image.vipssave(f"{name}.v", keep=details.keep)  # it looks at the suffix
    Path(f"{name}.v").rename(name)


VIPS = ImageFormat(
    name="VIPS",
    loader="vipsload",
    suffixes=(".v",),
    max_side=10**6,
    samples=("uint8", "uint16"),
    bits=16,
    alpha=False,
    gray=True,
    metadata_kinds=frozenset(),
    begins=lambda head: head.startswith((b"\x08\xf2\xa6\xb6", b"\xb6\xa6\xf2\x08")),
    save=save_vips,
)


@pytest.fixture(autouse=True)
def vips_files():
    known = list(FORMATS)
    add_format(VIPS)
    yield
    FORMATS.clear()
    for one in known:
        add_format(one)


def test_a_format_from_outside_is_read_and_written_by_every_job(tmp_path, read):
    rows = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    source = tmp_path / "in" / "a.v"
    source.parent.mkdir()
    pyvips.Image.new_from_array(rows, interpretation="srgb").vipssave(str(source))
    assert inspect_image(source).format == "VIPS"
    report = lowtide.upscale([source.parent], tmp_path / "out", scale=2)
    assert [one.status for one in report.images] == ["done"]
    made = pyvips.Image.new_from_file(str(tmp_path / "out" / "a.v")).numpy()
    # Its values are those that any other format gets.
    lowtide.upscale(source, tmp_path / "a.png", scale=2)
    np.testing.assert_array_equal(made, read(tmp_path / "a.png"))
