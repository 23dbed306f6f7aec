from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import pyvips
from PIL import Image, ImageOps

from lowtide import ImageError, OutputError
from lowtide.media import EncodeOptions, inspect_image, open_image
from support.media_files import make_exif, make_rows, read_image, write_image

SUFFIXES = [".png", ".jpg", ".webp", ".tif", ".avif"]


def vips(rows: np.ndarray) -> pyvips.Image:
    space = "srgb" if rows.shape[2] >= 3 else "b-w"
    return pyvips.Image.new_from_array(rows).copy(interpretation=space)


@pytest.mark.grid(3)
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once(tmp_path: Path, orientation: int, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    options = {"lossless": True} if suffix == ".webp" else {}
    Image.fromarray(make_rows(41, 67, 3)).save(path, exif=make_exif(orientation), **options)
    with Image.open(path) as image:
        shown = np.asarray(ImageOps.exif_transpose(image))
    back = read_image(path, step=9, scratch_dir=tmp_path)
    assert inspect_image(path).orientation == orientation
    assert back.shape == shown.shape
    assert np.abs(back.astype(int) - shown).max() <= (1 if suffix == ".jpg" else 0)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_an_oriented_output_is_not_turned_again(tmp_path: Path) -> None:
    Image.fromarray(make_rows(20, 30, 3)).save(tmp_path / "a.jpg", exif=make_exif(6))
    rows = read_image(tmp_path / "a.jpg")
    with open_image(tmp_path / "a.jpg") as source:
        metadata = source.metadata
    for suffix in SUFFIXES:
        path = write_image(tmp_path / f"out{suffix}", rows, metadata=metadata)
        facts = inspect_image(path)
        assert (facts.orientation, facts.info.width, facts.info.height) == (1, 20, 30)


@pytest.mark.parametrize("orientation", [3, 4, 5, 6, 7, 8])
def test_a_large_turned_image_crosses_block_borders(tmp_path: Path, orientation: int) -> None:
    y, x = np.mgrid[0:2500, 0:700]
    rows = (y * 701 + x).astype(np.uint16)[..., None]
    rows = np.concatenate([rows, rows // 3, rows // 7], axis=-1)
    image = vips(rows).copy(interpretation="rgb16")
    image.set_type(pyvips.GValue.gint_type, "orientation", orientation)
    image.pngsave(str(tmp_path / "a.png"), compression=1)
    turned = {
        3: rows[::-1, ::-1],
        4: rows[::-1],
        5: rows.transpose(1, 0, 2),
        6: rows.transpose(1, 0, 2)[:, ::-1],
        7: rows.transpose(1, 0, 2)[::-1, ::-1],
        8: rows.transpose(1, 0, 2)[::-1],
    }[orientation]
    assert np.array_equal(read_image(tmp_path / "a.png", step=64), turned)
    assert inspect_image(tmp_path / "a.png").scratch_bytes == rows.nbytes


def test_only_the_turned_need_scratch_space(tmp_path: Path) -> None:
    Image.fromarray(make_rows(8, 9, 3)).save(tmp_path / "a.png", exif=make_exif(2))
    assert inspect_image(tmp_path / "a.png").scratch_bytes == 0
    with open_image(tmp_path / "a.png", scratch_dir=tmp_path / "nowhere") as source:
        assert len(source.read(0, 100)) == 8


def test_a_missing_scratch_folder_is_an_output_error_with_the_bytes(tmp_path: Path) -> None:
    Image.fromarray(make_rows(8, 9, 3)).save(tmp_path / "a.png", exif=make_exif(6))
    with (
        open_image(tmp_path / "a.png", scratch_dir=tmp_path / "nowhere") as source,
        pytest.raises(OutputError, match=r"scratch.* 216 bytes") as caught,
    ):
        source.read(0, 1)
    assert "--scratch" in (caught.value.hint or "")


def test_a_full_scratch_disk_is_an_output_error(tmp_path: Path) -> None:
    Image.fromarray(make_rows(200, 300, 3)).save(tmp_path / "a.png", exif=make_exif(8))
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from lowtide.core.errors import OutputError; from lowtide.media import open_image\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: open_image(sys.argv[1], scratch_dir=Path(sys.argv[1]).parent).read(0, 1)\n"
        "except OutputError as error: print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(tmp_path / "a.png")], capture_output=True, text=True
    )
    assert "scratch folder is full" in done.stdout, done.stderr
    assert "180,000 bytes" in done.stdout


def test_rows_are_read_in_order_and_may_be_skipped(tmp_path: Path) -> None:
    for orientation in (1, 6):
        path, exif = tmp_path / "a.png", make_exif(orientation)
        Image.fromarray(make_rows(60, 60, 3)).save(path, exif=exif)
        rows, source = read_image(path), open_image(path)
        assert np.array_equal(source.read(0, 4), rows[:4])
        assert np.array_equal(source.read(31, 40), rows[31:40])
        with pytest.raises(ValueError, match="row 39 after row 40"):
            source.read(39, 41)
        assert np.array_equal(source.read(58, 70), rows[58:])
        assert source.read(60, 63).shape == (0, 60, 3)
        source.close()
        source.close()
        with pytest.raises(ValueError, match="after close"):
            source.read(60, 61)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_truncated_file_is_an_image_error(tmp_path: Path, suffix: str, part: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    path = write_image(tmp_path / f"a{suffix}", noise, options=EncodeOptions(avif_effort=0))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(ImageError, match=r"a\.\w+: damaged"):
        read_image(path)


def end_early(data: bytes, part: float) -> bytes:
    """Only a part of the data of a JPEG, with an end marker."""
    return data[: int(len(data) * part)] + b"\xff\xd9"


def claim(data: bytes, width: int, height: int) -> bytes:
    """A JPEG that says it has another size."""
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


KINDS = [{}, {"progressive": True}, {"restart_marker_rows": 1}]


@pytest.mark.grid(4)
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: end_early(data, 0.3),
        lambda data: end_early(data, 0.95),
        lambda data: claim(data, 600, 700),
        lambda data: claim(data, 30_000, 30_000),
    ],
    ids=["a third", "most", "taller", "huge"],
)
def test_a_jpeg_with_less_data_than_it_claims_is_an_image_error(
    tmp_path: Path, options: dict[str, object], damage: Callable[[bytes], bytes]
) -> None:
    """The rest was gray, and nothing said so."""
    path = tmp_path / "a.jpg"
    Image.fromarray(make_rows(400, 600, 3)).save(path, quality=90, **options)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with (
        pytest.raises(ImageError, match=r"a\.jpg: damaged or cut short after row \d+ of"),
        open_image(path) as source,
    ):
        for top in range(0, source.info.height, 20):
            source.read(top, top + 20)
    path.write_bytes(whole[:-2])  # no end marker
    with pytest.raises(ImageError, match="damaged or cut short"):
        read_image(path)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("place", ["segments", "scans", "end", "behind"])
def test_a_jpeg_with_bytes_that_belong_to_nothing_is_read(
    tmp_path: Path, place: str, orientation: int
) -> None:
    path, rows = tmp_path / "a.jpg", make_rows(120, 100, 3)
    exif = make_exif(orientation)
    Image.fromarray(rows).save(path, quality=90, progressive=True, exif=exif)
    expected, data = read_image(path), path.read_bytes()
    places = {
        "segments": data.find(b"\xff\xdb"),
        "scans": data.rfind(b"\xff\xda"),
        "end": len(data) - 2,
        "behind": len(data),
    }
    at = places[place]
    path.write_bytes(data[:at] + bytes(7) + data[at:])
    assert np.array_equal(read_image(path, step=9), expected)
    assert inspect_image(path).orientation == orientation


def test_a_truncated_png_error_names_the_rows_read(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (400, 100, 3), dtype=np.uint8)
    path = write_image(tmp_path / "a.png", noise)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ImageError, match=r"after row 1\d\d of 400"):
        read_image(path, step=10)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"hello, this is text\n", "a text file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", "an SVG"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"GIF89a", "unsupported GIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\x08\xf2\xa6\xb6" + b"\0" * 80, "a libvips image"),
        (b"\x89PNG\r\n\x1a\n", "unsupported PNG"),
        (b"\xff\xd8\xff\xe0", "unsupported JPEG"),
        (b"II*\0\x08\0\0\0", "unsupported TIFF"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "unsupported WebP"),
    ],
)
def test_a_file_that_is_no_image_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=what):
        open_image(path)


def test_missing_files_and_folders_are_image_errors(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no such file"):
        inspect_image(tmp_path / "a.png")
    with pytest.raises(ImageError, match="folder"):
        inspect_image(tmp_path)
    with pytest.raises(ImageError, match="cannot be read"):
        inspect_image(write_image(tmp_path / "a.png", make_rows(2, 2, 1)) / "b.png")


def test_too_many_pixels_are_refused_with_the_numbers(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.png", make_rows(30, 40, 1))
    assert inspect_image(path, max_pixels=1200).info.pixels == 1200
    with pytest.raises(ImageError, match=r"40 x 30 is 1,200 pixels and the limit is 1,199") as e:
        open_image(path, max_pixels=1199)
    assert e.value.hint is not None
    assert "--max-pixels 1200" in e.value.hint


def test_the_estimate_of_a_progressive_jpeg_counts_coefficients(tmp_path: Path) -> None:
    image = vips(make_rows(320, 640, 3))
    image.jpegsave(str(tmp_path / "base.jpg"), subsample_mode="off")
    image.jpegsave(str(tmp_path / "slow.jpg"), subsample_mode="off", interlace=True)
    base, slow = inspect_image(tmp_path / "base.jpg"), inspect_image(tmp_path / "slow.jpg")
    sizes = [(tmp_path / name).stat().st_size for name in ("base.jpg", "slow.jpg")]
    more = slow.resident_bytes - base.resident_bytes - (sizes[1] - sizes[0])
    assert more == 320 * 640 * 6
    assert "progressive" in slow.reason


def test_the_estimate_of_an_interlaced_png_counts_the_frame(tmp_path: Path) -> None:
    image = vips(make_rows(320, 640, 3))
    image.pngsave(str(tmp_path / "base.png"))
    image.pngsave(str(tmp_path / "slow.png"), interlace=True)
    base, slow = inspect_image(tmp_path / "base.png"), inspect_image(tmp_path / "slow.png")
    assert slow.resident_bytes - base.resident_bytes == 320 * 640 * 3
    assert np.array_equal(read_image(tmp_path / "slow.png"), read_image(tmp_path / "base.png"))


def test_cmyk_is_converted_and_gets_the_profile_of_srgb(tmp_path: Path) -> None:
    gray = Image.fromarray(make_rows(30, 40, 3)).convert("CMYK")
    gray.save(tmp_path / "a.jpg", quality=95)
    with open_image(tmp_path / "a.jpg") as source:
        assert source.facts.notes == ("CMYK converted to sRGB",)
        assert (source.info.channels, source.info.sample_type) == (3, "uint8")
        assert source.metadata.icc is not None
        assert source.metadata.icc[16:20] == b"RGB "
        assert source.read(0, 30).shape == (30, 40, 3)


def test_lab_is_converted(tmp_path: Path) -> None:
    rows = make_rows(30, 40, 3)
    vips(rows).colourspace("lab").tiffsave(str(tmp_path / "a.tif"))
    assert "converted to sRGB" in inspect_image(tmp_path / "a.tif").notes[0]
    assert np.abs(read_image(tmp_path / "a.tif").astype(int) - rows).max() <= 2


@pytest.mark.parametrize("kind", ["short", "int", "uint", "char"])
def test_other_sample_types_are_refused(tmp_path: Path, kind: str) -> None:
    vips(make_rows(4, 5, 1)).cast(kind).tiffsave(str(tmp_path / "a.tif"))
    with pytest.raises(ImageError, match=f"samples are of type {kind}"):
        inspect_image(tmp_path / "a.tif")


def test_the_first_page_is_read_and_the_others_are_mentioned(tmp_path: Path) -> None:
    pages = [Image.fromarray(make_rows(10, 12, 3) // (n + 1)) for n in range(3)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    assert inspect_image(tmp_path / "a.tif").notes == ("page 1 of 3 read",)
    assert np.array_equal(read_image(tmp_path / "a.tif"), np.asarray(pages[0]))


def test_the_estimate_of_a_tiff_counts_its_largest_piece(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (512, 512, 3), dtype=np.uint8)
    strips, plain = tmp_path / "a.tif", tmp_path / "b.tif"
    vips(noise).tiffsave(str(strips), compression="deflate")
    vips(noise).tiffsave(str(plain))
    more = inspect_image(strips).resident_bytes - inspect_image(plain).resident_bytes
    assert 128 * 512 * 3 * 0.9 < more < 128 * 512 * 3 * 1.1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_not_text_is_an_error_not_a_crash(tmp_path: Path) -> None:
    plain = write_image(tmp_path / "a.png", make_rows(8, 8, 3))
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    plain.rename(odd)
    with pytest.raises(ImageError, match="not valid text"):
        inspect_image(odd)
