from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import LowtideError, OutputError, UsageError
from lowtide.core.atomic_file import PART_PATTERN, part_path
from lowtide.media import EncodeOptions, open_sink
from lowtide.media.image_info import ImageInfo, SampleType
from support.media_files import FULL, info_of, make_rows, read_image, write_image

SUFFIXES = [".png", ".jpg", ".webp", ".tif", ".avif"]


def left_in(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_the_target_appears_only_with_the_commit(tmp_path: Path) -> None:
    target = tmp_path / "a.png"
    target.write_bytes(b"old")
    rows = make_rows(20, 30, 3)
    sink = open_sink(target, info_of(rows))
    sink.write(0, rows)
    assert [path.name for path in tmp_path.glob(PART_PATTERN)] == left_in(tmp_path)[:1]
    assert target.read_bytes() == b"old"
    assert sink.commit() == target
    assert left_in(tmp_path) == ["a.png"]
    assert np.array_equal(read_image(target), rows)
    sink.abort()
    assert target.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes as Unix has them")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nothing_is_written_through_an_existing_link(tmp_path: Path, suffix: str) -> None:
    """A link with the partial file's usual name led to another file, and a pipe blocked."""
    theirs, rows = tmp_path / "theirs", make_rows(20, 30, 3)
    theirs.write_text("theirs")
    for number, plant in enumerate((Path.symlink_to, Path.hardlink_to)):
        target = tmp_path / f"{number}{suffix}"
        plant(part_path(target), theirs)
        write_image(target, rows)
        assert read_image(target).shape == rows.shape
        assert part_path(target).samefile(theirs)
    target = tmp_path / f"pipe{suffix}"
    os.mkfifo(part_path(target))
    target.symlink_to(theirs)
    write_image(target, rows)
    assert not target.is_symlink()
    assert read_image(target).shape == rows.shape
    assert part_path(target).is_fifo()
    assert theirs.read_text() == "theirs"


@pytest.mark.grid(2)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("written", [0, 15, 30])
def test_abort_leaves_nothing(tmp_path: Path, suffix: str, written: int) -> None:
    rows = make_rows(30, 40, 3)
    sink = open_sink(tmp_path / "new" / "deep" / f"a{suffix}", info_of(rows))
    sink.write(0, rows[:written])
    sink.abort()
    sink.abort()
    assert left_in(tmp_path) == []
    with pytest.raises(ValueError, match="closed"):
        sink.write(0, rows)


def test_an_exception_in_the_block_aborts(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        open_sink(tmp_path / "a.png", ImageInfo(4, 4, 3)),
    ):
        raise KeyboardInterrupt
    assert left_in(tmp_path) == []


def test_missing_rows_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "a.png", ImageInfo(4, 10, 3))
    sink.write(0, np.zeros((9, 4, 3), np.uint8))
    with pytest.raises(OutputError, match="9 of 10 rows"):
        sink.commit()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "rows",
    [np.zeros((2, 5, 3), np.uint8), np.zeros((2, 4, 3), np.uint16), np.zeros((9, 4, 3), np.uint8)],
    ids=["width", "type", "too many"],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, rows: np.ndarray) -> None:
    with (
        open_sink(tmp_path / "a.png", ImageInfo(4, 8, 3)) as sink,
        pytest.raises(ValueError, match="rows"),
    ):
        sink.write(0, rows)


def test_rows_may_be_views(tmp_path: Path) -> None:
    for sample in ("uint8", "uint16", "float32"):
        rows = make_rows(30, 40, 4, sample)
        with open_sink(tmp_path / "a.tif", ImageInfo(20, 30, 3, sample)) as sink:
            sink.write(0, rows[:, ::2, 2::-1])
            sink.commit()
        assert np.array_equal(read_image(tmp_path / "a.tif"), rows[:, ::2, 2::-1])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    code = (
        "import resource, sys; import numpy as np\n"
        "from lowtide.core.errors import OutputError\n"
        "from lowtide.media.image_info import ImageInfo\n"
        "from lowtide.media import EncodeOptions, open_sink\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))\n"
        "rows = np.random.default_rng(0).integers(0, 255, (50, 400, 3), dtype=np.uint8)\n"
        "try:\n"
        "    options = EncodeOptions(avif_effort=0)\n"
        "    sink = open_sink(sys.argv[1], ImageInfo(400, 400, 3), options=options)\n"
        "    for number in range(8): sink.write(number * len(rows), rows)\n"
        "    sink.commit()\n"
        "except OutputError as error: print(error.message, '|', error.hint)\n"
    )
    words = [sys.executable, "-B", "-c", code, str(tmp_path / f"a{suffix}")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert f"a{suffix}: the disk is full" in done.stdout, (done.stdout, done.stderr)
    assert "free some space" in done.stdout
    assert left_in(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for target in (tmp_path / "file" / "a.png", tmp_path / "file" / "b" / "a.png"):
        with pytest.raises(OutputError, match="cannot be written"):
            open_sink(target, ImageInfo(4, 4, 3))
    assert left_in(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_output_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written"):
        open_sink(tmp_path / "a.png", ImageInfo(4, 4, 3))


def test_a_folder_as_target_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(OutputError, match="this is a folder"):
        open_sink(tmp_path / "a.png", ImageInfo(4, 4, 3))


def test_the_size_after_resizing_is_what_the_format_must_hold(tmp_path: Path) -> None:
    big = ImageInfo(20_000, 4, 3)
    with pytest.raises(OutputError, match=r"16,383"):
        open_sink(tmp_path / "a.webp", big)
    open_sink(tmp_path / "a.webp", big, resize_to=(10_000, 2)).abort()
    with pytest.raises(UsageError):
        open_sink(tmp_path / "a.bmp", big)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_rows_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    rows = make_rows(120, 150, 3)
    options = EncodeOptions(avif_effort=2)
    first = write_image(tmp_path / f"a{suffix}", rows, options=options, step=10)
    second = write_image(tmp_path / f"b{suffix}", rows, options=options, step=33)
    assert first.read_bytes() == second.read_bytes()


SIDES = st.integers(1, 90)


@settings(max_examples=40, deadline=None)
@given(SIDES, SIDES, SIDES, SIDES)
def test_resizing_is_exact(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int, to_width: int, to_height: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "resized.png"
    write_image(path, make_rows(height, width, 3), resize_to=(to_width, to_height))
    assert read_image(path).shape == (to_height, to_width, 3)


@pytest.mark.grid(5)
@pytest.mark.parametrize("sample", list(FULL))
@pytest.mark.parametrize("bands", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [(21, 17), (55, 81)], ids=["smaller", "larger"])
def test_a_constant_image_stays_constant(
    tmp_path: Path, sample: SampleType, bands: int, size: tuple[int, int]
) -> None:
    rows = np.full((40, 50, bands), 0.3 * FULL[sample]).astype(sample)
    back = read_image(write_image(tmp_path / "a.tif", rows, resize_to=size))
    assert back.shape == (size[1], size[0], bands)
    assert np.abs(back.astype(float) - float(rows[0, 0, 0])).max() <= (
        1e-5 if sample == "float32" else 0
    )


def test_color_under_transparency_does_not_bleed(tmp_path: Path) -> None:
    rows = np.zeros((40, 40, 4), np.uint8)
    rows[:, :20] = (200, 200, 200, 255)
    rows[:, 20:] = (0, 255, 0, 0)
    back = read_image(write_image(tmp_path / "a.png", rows, resize_to=(23, 23)))
    seen = back[back[..., 3] > 8].astype(int)
    assert np.abs(seen[:, :3] - 200).max() <= 2
    assert set(np.unique(back[:, -4:, 3])) == {0}


def test_shrinking_keeps_the_mean(tmp_path: Path) -> None:
    rows = make_rows(400, 600, 3)
    back = read_image(write_image(tmp_path / "a.png", rows, step=64, resize_to=(150, 100)))
    assert np.abs(back.mean((0, 1)) - rows.mean((0, 1))).max() < 0.05


@pytest.mark.parametrize(
    "bad",
    [
        {"png_compression": 10},
        {"jpeg_quality": 0},
        {"webp_quality": 101},
        {"avif_quality": -1},
        {"avif_effort": 10},
        {"jpeg_subsampling": "4:1:1"},
        {"tiff_compression": "jpeg"},
    ],
    ids=str,
)
def test_options_out_of_range_are_usage_errors(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        EncodeOptions(**bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("compression", ["none", "lzw", "deflate"])
def test_every_tiff_compression_is_lossless(tmp_path: Path, compression: str) -> None:
    options = EncodeOptions(tiff_compression=compression)  # pyright: ignore[reportArgumentType]
    for sample in FULL:
        rows = make_rows(30, 40, 3, sample)  # pyright: ignore[reportArgumentType]
        assert np.array_equal(
            read_image(write_image(tmp_path / "a.tif", rows, options=options)), rows
        )


def test_quality_and_compression_change_the_size(tmp_path: Path) -> None:
    rows = make_rows(200, 200, 3)
    for suffix, low, high in (
        (".jpg", {"jpeg_quality": 40}, {"jpeg_quality": 98}),
        (".jpg", {"jpeg_subsampling": "4:2:0"}, {"jpeg_subsampling": "4:4:4"}),
        (".webp", {"webp_quality": 30}, {"webp_quality": 95}),
        (".webp", {"webp_quality": 30}, {"webp_lossless": True}),
        (".avif", {"avif_quality": 20}, {"avif_quality": 95}),
        (".png", {"png_compression": 6}, {"png_compression": 0}),
    ):
        sizes = [
            write_image(tmp_path / f"a{suffix}", rows, options=EncodeOptions(**some)).stat().st_size
            for some in (low, high)
        ]
        assert sizes[0] < sizes[1], (suffix, low, high)


def test_errors_are_lowtides_own(tmp_path: Path) -> None:
    with pytest.raises(LowtideError):
        open_sink(tmp_path / "a.jpg", ImageInfo(4, 4, 4))
    assert left_in(tmp_path) == []
