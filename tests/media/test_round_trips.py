from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lowtide.media import EncodeOptions, inspect_image, output_sample
from lowtide.media.formats import FORMATS, ImageFormat
from lowtide.media.image_info import SampleType
from support.media_files import FULL, make_rows, read_image, unit, write_image

ALL = EncodeOptions(jpeg_quality=100, webp_lossless=True, avif_quality=100, avif_effort=0)
CASES = [
    (entry, sample, bands)
    for entry in FORMATS
    if entry.save
    for sample in FULL
    for bands in (1, 2, 3, 4)
    if entry.alpha or bands in (1, 3)
]


@pytest.mark.grid(5)
@pytest.mark.parametrize(
    ("entry", "sample", "bands"), CASES, ids=[f"{f.name}-{s}-{b}" for f, s, b in CASES]
)
def test_every_format_sample_and_band_count(
    tmp_path: Path, entry: ImageFormat, sample: SampleType, bands: int
) -> None:
    rows = make_rows(37, 53, bands, sample)
    path = write_image(tmp_path / ("a" + entry.suffixes[0]), rows, options=ALL)
    back = read_image(path)
    stored, _note = output_sample(entry, sample)
    assert back.dtype == stored
    if not entry.gray and bands < 3:
        # Stored as RGB: three times the gray, then the alpha.
        rows = np.concatenate([rows[..., :1]] * 3 + [rows[..., 1:]], axis=-1)
    assert back.shape == rows.shape
    # Half a level of what is stored, and for the lossy formats a few percent on top.
    step = 0.5 / {"uint8": 255, "uint16": (1 << entry.bits) - 1, "float32": 1e9}[stored]
    lossy = entry.name in ("JPEG", "AVIF")
    worst = 0.0 if stored == sample and not lossy else step * 1.01 + 0.04 * lossy
    assert np.abs(unit(back) - unit(rows)).max() <= worst


def test_a_16_bit_ramp_keeps_its_levels(tmp_path: Path) -> None:
    ramp = np.arange(65_536, dtype=np.uint16).reshape(256, 256, 1)
    for name in ("a.png", "a.tif"):
        assert len(np.unique(read_image(write_image(tmp_path / name, ramp)))) == 65_536


def test_12_bit_avif_white_is_white_and_black_is_black(tmp_path: Path) -> None:
    rows = np.zeros((32, 32, 3), np.uint16)
    rows[:, 16:] = 65_535
    back = read_image(write_image(tmp_path / "a.avif", rows, options=ALL))
    assert back[:, :8].max() <= 64
    assert back[:, -8:].min() >= 65_535 - 64
    flat = read_image(write_image(tmp_path / "b.avif", np.full_like(rows, 65_535), options=ALL))
    assert flat.min() == 65_535


def test_a_dark_16_bit_image_stays_16_bit(tmp_path: Path) -> None:
    rows = np.arange(200, dtype=np.uint16).reshape(10, 20, 1)
    for name in ("a.png", "a.tif"):
        back = read_image(write_image(tmp_path / name, rows))
        assert back.dtype == np.uint16
        assert np.array_equal(back, rows)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif", ".avif"])
def test_one_pixel(tmp_path: Path, suffix: str) -> None:
    rows = np.full((1, 1, 3), 128, np.uint8)
    back = read_image(write_image(tmp_path / f"a{suffix}", rows))
    assert back.shape == (1, 1, 3)
    assert np.abs(back.astype(int) - 128).max() <= 3


def test_other_programs_read_the_same_pixels(tmp_path: Path) -> None:
    rows = make_rows(40, 31, 4)
    for name in ("a.png", "a.tif"):
        with Image.open(write_image(tmp_path / name, rows)) as image:
            assert np.array_equal(np.asarray(image), rows)


def test_palette_and_1_bit_images_expand_to_8_bits(tmp_path: Path) -> None:
    gray = make_rows(20, 30, 1)[..., 0]
    Image.fromarray(gray).convert("P").save(tmp_path / "palette.png")
    Image.fromarray(gray).convert("1").save(tmp_path / "bits.png")
    facts = inspect_image(tmp_path / "palette.png")
    assert (facts.info.channels, facts.notes) == (3, ("palette expanded",))
    facts = inspect_image(tmp_path / "bits.png")
    assert (facts.info.channels, facts.notes) == (1, ("1-bit samples expanded to 8 bits",))
    assert set(np.unique(read_image(tmp_path / "bits.png"))) == {0, 255}
