from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowtide import ImageError, UsageError
from lowtide.media.detect import skipped_summary
from lowtide.media.discover import discover_files


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def pairs(root: Path, inputs: list[str], output: str, **options: str) -> dict[str, str]:
    found = discover_files([str(root / item) for item in inputs], f"{root}/{output}", **options)
    return {
        job.source.relative_to(root).as_posix(): job.target.relative_to(root).as_posix()
        for job in found.pairs
    }


def test_one_file_to_a_file(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    assert pairs(tmp_path, ["a.png"], "b.jpg") == {"a.png": "b.jpg"}


def test_one_file_to_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "there.png/x.txt")
    assert pairs(tmp_path, ["a.png"], "out/") == {"a.png": "out/a.png"}
    assert pairs(tmp_path, ["a.png"], "there.png") == {"a.png": "there.png/a.png"}


def test_one_file_to_a_name_without_a_suffix(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    assert pairs(tmp_path, ["a.png"], "out") == {"a.png": "out"}
    assert discover_files([tmp_path / "a.png"], tmp_path / "out").single_file


def test_format_and_added_text_change_the_names(tmp_path: Path) -> None:
    touch(tmp_path, "a.b.png")
    options = {"format": "JPG", "suffix_text": "_x4"}
    assert pairs(tmp_path, ["a.b.png"], "out/", **options) == {"a.b.png": "out/a.b_x4.jpg"}


def test_a_folder_is_mirrored_sorted_and_without_what_is_no_image(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "in/z.png",
        "in/b/c.WEBP",
        "in/a.tif",
        "in/readme.txt",
        "in/.hidden.png",
        "in/.dir/a.png",
        "in/.z.png.lowtide.part",
    )
    assert list(pairs(tmp_path, ["in"], "out").items()) == [
        ("in/a.tif", "out/a.tif"),
        ("in/b/c.WEBP", "out/b/c.WEBP"),
        ("in/z.png", "out/z.png"),
    ]


def test_an_output_folder_inside_the_input_is_not_an_input(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.png", "in/out/a.png", "in/out/deep/b.png", "in/outer/c.png")
    assert pairs(tmp_path, ["in"], "in/out") == {
        "in/a.png": "in/out/a.png",
        "in/outer/c.png": "in/out/outer/c.png",
    }


def test_skipped_files_are_named_with_their_reason(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "in/a.png",
        "in/.hidden.png",
        "in/.dir/a.png",
        "in/.dir/b.png",
        "in/out/b.png",
        "in/.a.png.lowtide.part",
        "in/.lowtide-journal.jsonl",
        "in/c.CR2",
        "in/d.gif",
        "in/d.ico",
    )
    (tmp_path / "in" / "a.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "in" / "image").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "in" / "empty").touch()
    (tmp_path / "in" / "gone.png").symlink_to("nowhere")
    (tmp_path / "in" / "round").symlink_to(tmp_path / "in", target_is_directory=True)
    os.mkfifo(tmp_path / "in" / "pipe.png")
    found = discover_files([tmp_path / "in"], tmp_path / "in" / "out")
    assert [(job.name, job.target.name) for job in found.pairs] == [
        ("a.png", "a.png"),
        ("d.gif", "d.png"),  # of a format that is only read
    ]
    assert {one.path.name: one.reason for one in found.skipped} == {
        ".dir": "hidden",
        ".hidden.png": "hidden",
        "a.pdf": "a PDF document",
        "c.CR2": "camera RAW, needs developing first",
        "d.ico": "a text file",
        "empty": "empty",
        "gone.png": "a broken link",
        "image": "PNG by its content, but not by its name",
        "out": "the output folder",
        "pipe.png": "not a regular file",
        "round": "a link to a folder",
    }
    lines = skipped_summary(found.skipped)
    assert lines[0] == f"hidden: {tmp_path / 'in' / '.dir'}, {tmp_path / 'in' / '.hidden.png'}"
    assert len(lines) == 10


def test_a_pattern_leaves_out_what_is_no_image(tmp_path: Path) -> None:
    touch(tmp_path, "a1.png", "a2.txt", "a3/x.png")
    found = discover_files([str(tmp_path / "a*")], f"{tmp_path}/out/")
    assert {one.path.name: one.reason for one in found.skipped} == {
        "a2.txt": "a text file",
        "a3": "a folder",
    }


def test_results_next_to_their_inputs_are_not_inputs(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.png", "in/a_x2.png", "in/b_x2.png", "in/c.png")
    assert pairs(tmp_path, ["in"], "in", suffix_text="_x2") == {
        "in/a.png": "in/a_x2.png",
        "in/b_x2.png": "in/b_x2_x2.png",
        "in/c.png": "in/c_x2.png",
    }
    with pytest.raises(UsageError, match="is the input"):
        pairs(tmp_path, ["in"], "in")


@pytest.mark.parametrize("inputs", [["in"], ["in/a.png", "in/c.png"], ["in/*"]])
def test_several_results_do_not_go_into_one_file(tmp_path: Path, inputs: list[str]) -> None:
    touch(tmp_path, "in/a.png", "in/c.png", "there.png/x")
    with pytest.raises(UsageError, match=r"out\.png names one file") as caught:
        pairs(tmp_path, inputs, "out.png")
    assert caught.value.hint == f"name a folder: -o {tmp_path / 'out'}"
    # A folder of such a name, there or meant, is one.
    for folder in ("there.png", "out.png/"):
        assert len(pairs(tmp_path, inputs, folder)) == 2


@pytest.mark.parametrize("options", [{"format": "jpg"}, {"suffix_text": "_x2"}])
def test_options_that_contradict_the_output_name_are_refused(tmp_path: Path, options) -> None:
    touch(tmp_path, "a.png")
    with pytest.raises(UsageError):
        pairs(tmp_path, ["a.png"], "b.png", **options)
    assert pairs(tmp_path, ["a.png"], "b.jpeg", format="jpg") == {"a.png": "b.jpeg"}


def test_patterns(tmp_path: Path) -> None:
    touch(tmp_path, "a1.png", "a2.png", "b.png", "a3.txt", "s/a4.png")
    assert pairs(tmp_path, ["a*"], "out") == {"a1.png": "out/a1.png", "a2.png": "out/a2.png"}
    assert len(pairs(tmp_path, ["**/a*.png"], "out")) == 3
    with pytest.raises(ImageError, match="matches no image"):
        pairs(tmp_path, ["q*.png"], "out")


def test_a_file_with_brackets_in_its_name_is_that_file(tmp_path: Path) -> None:
    touch(tmp_path, "a[1].png")
    assert pairs(tmp_path, ["a[1].png"], "b.png") == {"a[1].png": "b.png"}


def test_an_input_named_twice_is_one_job(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.png")
    assert len(pairs(tmp_path, ["in", "in/a.png"], "out")) == 1


def test_two_inputs_for_one_output_are_refused_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.png", "in/a.jpg", "x/b.png", "y/B.PNG")
    with pytest.raises(UsageError, match=r"in/a\.jpg and .*in/a\.png"):
        pairs(tmp_path, ["in"], "out", format="png")
    with pytest.raises(UsageError, match=r"x/b\.png and .*y/B\.PNG"):
        pairs(tmp_path, ["x/b.png", "y/B.PNG"], "out")


@pytest.mark.parametrize("output", ["a.png", ".", "A.PNG", "sub/../a.png"])
def test_an_output_that_is_the_input_is_refused(tmp_path: Path, output: str) -> None:
    touch(tmp_path, "a.png", "sub/x.txt")
    with pytest.raises(UsageError, match="is the input"):
        pairs(tmp_path, ["a.png"], output)


def test_an_output_that_is_another_input_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "b/a.png")
    with pytest.raises(UsageError, match="is the input"):
        pairs(tmp_path, ["a.jpg", "b/a.png"], "b", format="png")


def test_unsupported_suffixes_are_refused_with_a_list(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "b.ico")
    for inputs, output, options in (
        (["a.png"], "b.bmp", {}),
        (["a.png"], "out", {"format": "gif"}),
        (["b.ico"], "out/", {}),
    ):
        with pytest.raises(UsageError) as caught:
            pairs(tmp_path, inputs, output, **options)
        assert ".png" in (caught.value.hint or "")


def test_nothing_there_is_an_image_error(tmp_path: Path) -> None:
    touch(tmp_path, "in/readme.txt")
    with pytest.raises(ImageError, match="no such file"):
        pairs(tmp_path, ["a.png"], "out")
    with pytest.raises(ImageError, match="no images"):
        pairs(tmp_path, ["in"], "out")
    with pytest.raises(UsageError, match="no input"):
        discover_files([], tmp_path)
