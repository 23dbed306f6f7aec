"""TIFF files that are more than a picture: camera RAW, and bands that are no color."""

import struct
from pathlib import Path

import numpy as np
import pytest

from lowtide import ImageError
from lowtide.media import inspect_image
from support.media_files import info_of, make_rows, read_image, write_image

ROWS = make_rows(16, 24, 3)
SUBDIRECTORIES = 330
PREVIEW, CFA = {254: 1}, {254: 0, 262: 32803, 277: 1, 258: 8}
DNG = {50706: b"\1\4\0\0"}


def tiff(*pages: dict, order: str = "<", signature: bytes = b"") -> bytes:
    """A TIFF of one strip for each page; the second one lies below the first.

    A page is ``{"rows": array, tag: number, numbers or bytes}``.
    """
    data = bytearray(struct.pack(order + "2sHL", b"II" if order == "<" else b"MM", 42, 0))
    data += signature
    places = []
    for page in reversed(pages):
        rows, tags = page["rows"], {key: value for key, value in page.items() if key != "rows"}
        strip = len(data)
        data += rows.tobytes() + b"\0" * (-rows.nbytes % 2)
        tags = {
            256: rows.shape[1],
            257: rows.shape[0],
            258: (8,) * rows.shape[2],
            259: 1,
            262: 2 if rows.shape[2] >= 3 else 1,
            273: strip,
            277: rows.shape[2],
            278: rows.shape[0],
            279: rows.nbytes,
            **tags,
        }
        if page is pages[0] and places:
            tags[SUBDIRECTORIES] = places[0]
        entries = b""
        for tag in sorted(tags):
            value = tags[tag]
            if isinstance(value, bytes):
                kind, count, packed = (2 if tag == 271 else 1), len(value), value
            else:
                numbers = value if isinstance(value, tuple) else (value,)
                kind, count = 4, len(numbers)
                packed = struct.pack(f"{order}{count}L", *numbers)
            if len(packed) > 4:
                place, packed = len(data), packed + b"\0" * (len(packed) % 2)
                data += packed
                packed = struct.pack(order + "L", place)
            entries += struct.pack(order + "HHL", tag, kind, count) + packed.ljust(4, b"\0")
        places.append(len(data))
        data += struct.pack(order + "H", len(tags)) + entries + b"\0" * 4
    struct.pack_into(order + "L", data, 4, places[-1])
    return bytes(data)


def saved(path: Path, *pages: dict, **options) -> Path:
    path.write_bytes(tiff(*pages, **options))
    return path


def sensor(**tags) -> dict:
    return {"rows": make_rows(64, 96, 1), **CFA, **tags}


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    ("name", "pages", "called"),
    [
        ("a.kdc", [{"rows": ROWS, **PREVIEW, 271: b"Kodak\0"}, sensor()], "KDC"),
        ("a.tif", [{"rows": ROWS, **PREVIEW, 271: b"Kodak\0"}, sensor()], "in a TIFF"),
        ("a.dng", [{"rows": ROWS, **PREVIEW, **DNG}, sensor()], "DNG"),
        ("a.tif", [{"rows": ROWS, **DNG}], "DNG"),
        ("a.tif", [{"rows": ROWS}, {"rows": ROWS, 262: 34892}], "in a TIFF"),
        ("a.tif", [{"rows": ROWS, **PREVIEW, 271: b"Sony\0"}, {"rows": ROWS}], "in a TIFF"),
        ("a.tif", [{"rows": ROWS}, {"rows": ROWS, 259: 34713}], "in a TIFF"),
        # Nothing but its name says so.
        ("a.NEF", [{"rows": ROWS}], "NEF"),
    ],
)
def test_a_raw_file_is_not_its_preview(tmp_path, name, pages, called, order) -> None:
    path = saved(tmp_path / name, *pages, order=order)
    with pytest.raises(ImageError, match=f"camera RAW file .{called}.") as caught:
        inspect_image(path)
    assert f"darktable-cli {path} a_developed.tif" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("head", "called"),
    [
        (b"II*\0\x10\0\0\0CR\2\0", "Canon CR2"),
        (b"\0\0\0\x18ftypcrx \0\0\0\1crx isom", "Canon CR3"),
        (b"II\x1a\0\0\0HEAPCCDR", "Canon CRW"),
        (b"IIRO\x08\0\0\0", "Olympus ORF"),
        (b"IIRS\x08\0\0\0", "Olympus ORF"),
        (b"MMOR\0\0\0\x08", "Olympus ORF"),
        (b"IIU\0\x18\0\0\0", "Panasonic RW2"),
        (b"FUJIFILMCCD-RAW 0201", "Fujifilm RAF"),
        (b"MM\0*\0\0\0\x08MMMMRaw", "Phase One IIQ"),
    ],
)
def test_raw_files_of_other_kinds_are_known_by_how_they_begin(tmp_path, head, called) -> None:
    (tmp_path / "a.tif").write_bytes(head + bytes(600))
    with pytest.raises(ImageError, match=f"camera RAW file .{called}."):
        inspect_image(tmp_path / "a.tif")


def test_files_that_are_not_raw_are_read(tmp_path) -> None:
    """A camera's own TIFF, and a pyramid, whose first image is the largest."""
    camera = saved(tmp_path / "camera.tif", {"rows": ROWS, 271: b"Maker\0", 272: b"Model\0"})
    half = np.ascontiguousarray(ROWS[::2, ::2])
    below = {"rows": half, **PREVIEW}
    pyramid = saved(tmp_path / "pyramid.tif", {"rows": ROWS, 271: b"Maker\0"}, below)
    for path in (camera, pyramid):
        assert np.array_equal(read_image(path), ROWS)
    text = tmp_path / "letter.txt"
    text.write_text("IIIIIIIIIIIIIIII is what I say")
    with pytest.raises(ImageError, match="a text file"):
        inspect_image(text)


def test_a_directory_that_points_nowhere_or_to_itself_ends(tmp_path) -> None:
    data = bytearray(tiff({"rows": ROWS}, {"rows": ROWS}))
    (first,) = struct.unpack_from("<L", data, 4)
    (count,) = struct.unpack_from("<H", data, first)
    entries = range(first + 2, first + 2 + 12 * count, 12)
    place = next(at for at in entries if struct.unpack_from("<H", data, at)[0] == SUBDIRECTORIES)
    for target in (first, len(data) + 1000, 2**32 - 1):
        struct.pack_into("<L", data, place + 8, target)
        (tmp_path / "a.tif").write_bytes(data)
        assert np.array_equal(read_image(tmp_path / "a.tif"), ROWS)


# Bands beyond color


def with_bands(bands: int) -> np.ndarray:
    rows = make_rows(16, 24, min(bands, 3) if bands != 2 else 1)
    more = [np.full((16, 24, 1), 100 + band, np.uint8) for band in range(rows.shape[2], bands)]
    return np.concatenate([rows, *more], axis=2)


@pytest.mark.parametrize(
    ("bands", "extra", "kept", "note"),
    [
        (4, 2, (0, 1, 2, 3), ""),
        (4, 0, (0, 1, 2), "channel 4 is neither color nor alpha"),
        (4, None, (0, 1, 2), "channel 4 is neither color nor alpha"),
        (2, 2, (0, 1), ""),
        (2, 0, (0,), "channel 2 is neither color nor alpha"),
        (5, (0, 0), (0, 1, 2), "channels 4, 5 are neither color nor alpha"),
        (5, (0, 2), (0, 1, 2, 4), "channel 4 is neither color nor alpha"),
        (5, (2, 0), (0, 1, 2, 3), "channel 5 is neither color nor alpha"),
        (6, (0, 2, 0), (0, 1, 2, 4), "channels 4, 6 are neither color nor alpha"),
    ],
)
def test_a_band_is_transparency_if_the_file_says_so(tmp_path, bands, extra, kept, note) -> None:
    rows = with_bands(bands)
    path = saved(tmp_path / "a.tif", {"rows": rows, **({} if extra is None else {338: extra})})
    assert np.array_equal(read_image(path), rows[..., kept])
    notes = inspect_image(path).notes
    assert [each.startswith(note) for each in notes] == [True] * bool(note)


def test_color_that_was_multiplied_by_its_transparency_is_divided_by_it(tmp_path) -> None:
    rows = np.full((8, 8, 4), 60, np.uint8)
    rows[..., 3] = 128
    path = saved(tmp_path / "a.tif", {"rows": rows, 338: 1})
    assert np.abs(read_image(path)[0, 0].astype(int) - (120, 120, 120, 128)).max() <= 1


def test_our_own_transparency_is_read_again(tmp_path) -> None:
    rows = make_rows(16, 24, 4)
    assert info_of(rows).alpha
    assert np.array_equal(read_image(write_image(tmp_path / "a.tif", rows)), rows)


def test_the_estimate_counts_bands_that_are_dropped(tmp_path) -> None:
    """They are decoded like the others."""
    rows = make_rows(16, 4000, 3)
    plain = saved(tmp_path / "a.tif", {"rows": rows})
    many = saved(tmp_path / "b.tif", {"rows": np.tile(rows, (1, 1, 16)), 258: 8})
    more = inspect_image(many).resident_bytes - inspect_image(plain).resident_bytes
    assert more > 45 * rows.nbytes // 3
