"""What may be an input and what an output, as the commands say it."""

import os
import socket
import stat
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files as Unix has them")

# Commands that read PIPE, of the suffix before them.
READERS = [
    (".png", "upscale PIPE -o out.png"),
    (".png", "upscale in.png PIPE -o out/"),
    (".png", "plan upscale PIPE"),
    (".png", "denoise in.png -o out.png --reference PIPE"),
    (".png", "export onnx lowtide-x2 -o out.onnx --precision int8 --calibrate PIPE"),
    (".dng", "denoise PIPE -o out.tif"),
    (".nii.gz", "denoise PIPE -o out.nii"),
    (".json", "denoise in.png -o out.png --noise PIPE"),
    (".json", "upscale in.png -o out.png --plan PIPE"),
    (".mkv", "video PIPE -o out.mkv"),
    (".mkv", "vae roundtrip PIPE -m PIPE"),
    (".safetensors", "vae decode PIPE -o out.mkv -m PIPE"),
    (".safetensors", "upscale in.png -o out.png -m PIPE"),
    (".pth", "models PIPE"),
    (".onnx", "upscale in.png -o out.png -m PIPE"),
    (".csv", "forecast PIPE --horizon 4"),
    (".parquet", "backtest PIPE --horizon 4"),
    (".yml", "train sr PIPE"),
    (".csv", "train forecast PIPE --horizons 4"),
    (".py", "plan train PIPE:net --device cpu"),
]
# Commands that write OUT, and its suffix.
WRITERS = [
    (".png", "upscale in.png -o OUT"),
    (".png", "upscale in.png -o out.png --report"),  # whose report is a pipe
    (".png", "denoise in.png -o out.tif --comparison OUT"),
    (".csv", "forecast table.csv --horizon 4 -o OUT"),
    (".pq", "forecast table.csv --horizon 4 --samples-output OUT"),
    (".svg", "forecast table.csv --horizon 4 --plot OUT"),
    (".json", "backtest table.csv --horizon 4 -o OUT"),
    (".json", "train noise --images photos -o OUT"),
    (".onnx", "export onnx lowtide-x2 -o OUT"),
]


@pytest.fixture
def folder(tmp_path, save, photo, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "in.png", photo[:24, :32])
    save(tmp_path / "photos" / "a.png", photo[:128, :128])
    rows = [f"2026-01-{day + 1:02} {hour:02}:00,{hour}" for day in range(9) for hour in range(24)]
    (tmp_path / "table.csv").write_text("\n".join(["date,y", *rows, ""]))
    return tmp_path


def needs(suffix: str) -> None:
    for package in {".mkv": ["av"], ".nii.gz": ["nibabel"], ".dng": ["rawpy"]}.get(suffix, []):
        pytest.importorskip(package)
    if suffix in (".csv", ".parquet", ".pq", ".svg"):
        pytest.importorskip("pandas")
        pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("suffix", "words"), READERS)
def test_a_pipe_is_no_input_and_nothing_waits_for_it(lowtide, folder, suffix, words):
    needs(suffix)
    os.mkfifo(f"pipe{suffix}")
    before = sorted(folder.rglob("*"))
    done = lowtide(*words.replace("PIPE", f"pipe{suffix}").split())
    assert done.code == 2
    assert f"pipe{suffix}: not a regular file" in done.err
    assert sorted(folder.rglob("*")) == before


def test_nor_is_a_socket_or_a_link_to_a_pipe(lowtide, folder, monkeypatch):
    os.mkfifo("pipe")
    (folder / "link.png").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as place:
        place.bind("socket.png")
        for name in ("link.png", "socket.png"):
            assert "not a regular file" in lowtide("upscale", name, "-o", "out.png").err
    (folder / "good.png").symlink_to("in.png")
    assert lowtide("plan", "upscale", "good.png").code == 0


@pytest.mark.parametrize(("suffix", "words"), WRITERS)
def test_force_replaces_no_pipe(lowtide, folder, suffix, words):
    needs(suffix)
    pipe = folder / ("out.png.lowtide.json" if "--report" in words else f"pipe{suffix}")
    os.mkfifo(pipe)
    done = lowtide(*words.replace("OUT", pipe.name).split(), "--force")
    assert done.code == 1
    assert f"{pipe.name}: not a regular file" in done.err
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert not list(folder.glob("out*")) or "--report" in words


def test_of_a_folder_the_other_results_are_made(lowtide, folder):
    (folder / "out").mkdir()
    os.mkfifo(folder / "out" / "in.png")
    done = lowtide("upscale", "in.png", "photos", "-o", "out", "--force")
    assert done.code == 4
    assert "in.png: not a regular file" in done.out
    assert (folder / "out" / "a.png").is_file()
    assert stat.S_ISFIFO((folder / "out" / "in.png").lstat().st_mode)


@pytest.mark.parametrize(("suffix", "words"), [one for one in WRITERS if "OUT" in one[1]])
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("n" * 300, 1, "File name too long"),
        ("\udcff", 2, "not valid text"),
        ("", 2, "empty"),
        ("in.png/below", 1, "Not a directory"),
    ],
)
def test_names_are_checked_before_any_work(lowtide, folder, suffix, words, name, code, message):
    needs(suffix)
    before = sorted(folder.rglob("*"))
    done = lowtide(*[name + suffix * bool(name) if w == "OUT" else w for w in words.split()])
    assert done.code in (code, 2)
    assert message in done.err or "has no name" in done.err or "no such folder" in done.err
    assert sorted(folder.rglob("*")) == before


def test_empty_names_are_not_this_folder(lowtide, folder):
    for words in (
        ["upscale", "", "-o", "out.png"],
        ["video", "", "-o", "out.mkv"],
        ["train", "sr", "photos", "-o", ""],
        ["train", "sr", ""],
        ["train", "noise", "--images", "", "-o", "out.json"],
        ["vae", "encode", "in.mkv", "-m", "model", "-o", ""],
    ):
        done = lowtide(*words)
        assert done.code == 2, words
        assert "no name" in done.err or "is empty" in done.err


def test_names_that_are_too_long_end_no_command_in_a_traceback(lowtide, folder):
    pytest.importorskip("pandas")
    long = "n" * 300
    for words, code in (
        (["upscale", f"{long}.png", "-o", "out.png"], 2),
        (["upscale", "in.png", "-o", f"{long}/"], 1),
        (["upscale", "in.png", "-o", "out.png", "-m", f"{long}.pth"], 2),
        (["denoise", "in.png", "-o", "out.png", "--reference", f"{long}.png"], 2),
        (["denoise", "in.png", "-o", "out.png", "--noise", f"{long}.json"], 2),
        (["forecast", "table.csv", "--horizon", 4, "-m", long], 2),
        (["train", "forecast", "table.csv", "--horizons", 4, "-o", long], 1),
        (["train", "sr", f"{long}.yml"], 2),
        (["plan", "train", "~nobody-has-this-name/a.py:net", "--device", "cpu"], 2),
    ):
        assert lowtide(*words).code == code, words


def test_tables_and_reports_have_names_of_their_formats(lowtide, folder):
    pytest.importorskip("pandas")
    for words, message in (
        ("forecast table.csv --horizon 4 -o out.xlsx", "not written as .xlsx"),
        ("forecast table.csv --horizon 4 --samples-output out.txt", "not written as .txt"),
        ("backtest table.csv --horizon 4 -o out.csv", "reports are .json files"),
        ("forecast table.csv --horizon 4 -o none/out.csv", "none/out.csv: cannot be written"),
    ):
        done = lowtide(*words.split())
        assert done.code and message in done.err
    assert not list(folder.glob("out*"))


def test_a_link_to_a_file_is_replaced_and_not_the_file(lowtide, folder, read):
    theirs = (folder / "photos" / "a.png").read_bytes()
    (folder / "link.png").symlink_to("photos/a.png")
    assert "already exists" in lowtide("upscale", "in.png", "-o", "link.png").err
    assert lowtide("upscale", "in.png", "-o", "link.png", "--force").code == 0
    assert (folder / "photos" / "a.png").read_bytes() == theirs
    assert not (folder / "link.png").is_symlink()
    assert np.shape(read(folder / "link.png")) == (48, 64, 3)
