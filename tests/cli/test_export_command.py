"""`lowtide export onnx`: what is printed where, exit codes, and every option's effect."""

import re
from pathlib import Path

import pytest
import typer

from lowtide.cli.main import app

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def target(tmp_path):
    return tmp_path / "model.onnx"


def test_the_report_is_on_stdout(lowtide, target):
    result = lowtide("export", "onnx", "lowtide-x2", "-o", target, "--quiet")
    assert result.code == 0, result.err
    assert result.err == ""
    lines = result.out.splitlines()
    assert re.fullmatch(re.escape(str(target)) + r": \d+ KiB, opset 23, fp32", lines[0])
    assert lines[1] == "  model      lowtide-x2, ParagonConv ×2, 50,604 parameters"
    assert re.fullmatch(
        r"  checked    50×33: differs by \d\.\de-\d\d from PyTorch in fp32", lines[2]
    )
    assert re.search(r"CPU time   80×64: .* s by ONNX Runtime, .* s by PyTorch", lines[-1])


def test_each_step_is_printed(lowtide, target):
    result = lowtide("export", "onnx", "lowtide-x2", "-o", target)
    lines = result.err.splitlines()
    assert lines[0] == "exporting: tracing the model; a deep one takes minutes"
    assert re.fullmatch(r"exporting: simplifying a graph of \d+ operators", lines[1])
    assert lines[2] == "exporting: comparing with PyTorch at 50×33"


def test_json_and_every_option(lowtide, target):
    target.write_bytes(b"old")
    result = lowtide(
        "export",
        "onnx",
        "lowtide-x2",
        "--output",
        target,
        "--precision",
        "bf16",
        "--opset",
        23,
        "--unchecked",
        "--force",
        "--json",
    )
    assert result.code == 0, result.err
    data = result.json
    assert data["schema_version"] == 2
    assert (data["precision"], data["opset"], data["checked"]) == ("bf16", 23, False)
    assert data["file_bytes"] == target.stat().st_size
    assert "Conv(22)" in data["unchecked_reason"]


def test_older_opset(lowtide, target):
    result = lowtide("export", "onnx", "lowtide-x2", "-o", target, "--opset", 20, "--json")
    assert result.json["opset"] == 20
    assert [one.version for one in onnx.load(target).opset_import if not one.domain] == [20]


ERRORS = [
    (["lowtide-x3", "-o", "{}"], 2, "there is no model 'lowtide-x3'", "did you mean"),
    (["lowtide-x2", "-o", "{}", "--opset", "7"], 2, "opset 7 is not one of 20, 23", "--opset"),
    (
        ["lowtide-x2", "-o", "{}", "--precision", "bf16"],
        2,
        "cannot run it in bf16",
        "--unchecked",
    ),
    (
        ["lowtide-x2", "-o", "{}", "--precision", "bf16", "--opset", "20"],
        2,
        "opset 20 has no convolution in bf16",
        "--opset 23",
    ),
    (["lowtide-x2", "-o", "{}.pt"], 2, "does not end in .onnx", "model.onnx.onnx"),
    (["lowtide-x2", "-o", "/nowhere/at/all.onnx"], 1, "cannot be written", "a folder"),
]


def test_errors(lowtide, target):
    for words, code, message, hint in ERRORS:
        result = lowtide("export", "onnx", *(word.format(target) for word in words))
        assert result.code == code, result.err
        assert result.out == ""
        assert message in result.err
        assert hint in result.err
        assert "Traceback" not in result.err
        assert not list(target.parent.iterdir())


def test_an_output_is_required(lowtide):
    result = lowtide("export", "onnx", "lowtide-x2")
    assert result.code == 2
    assert "--output" in result.err


def test_errors_as_json(lowtide, target):
    target.write_bytes(b"old")
    result = lowtide("export", "onnx", "lowtide-x2", "-o", target, "--json")
    assert result.code == 2
    assert result.json["error"]["message"].endswith("already exists")
    assert target.read_bytes() == b"old"


def test_every_option_is_documented():
    page = (ROOT / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    section = page.split("\n## lowtide export onnx\n")[1].split("\n## ")[0]
    command = typer.main.get_command(app).commands["export"].commands["onnx"]
    options = {name for option in command.params for name in option.opts if name.startswith("-")}
    assert len(options) == 10
    assert not {name for name in options if not re.search(rf"`{name}[ `]", section)}


def test_help_names_the_options(lowtide):
    result = lowtide("export", "onnx", "--help")
    assert result.code == 0
    for word in ("Usage: lowtide export onnx", "MODEL", "--precision", "--opset", "--unchecked"):
        assert word in result.out


def test_8_bits(lowtide, target, tmp_path, save, photo):
    source = save(tmp_path / "photo.png", photo[:200, :200])
    words = ["export", "onnx", "lowtide-x2", "-o", target, "--precision", "int8"]
    refused = lowtide(*words)
    assert refused.code == 2
    assert "--calibrate FOLDER" in refused.err
    done = lowtide(*words, "--calibrate", source, "--json")
    assert done.code == 0, done.err
    assert done.json["precision"] == "int8"
    assert all(one["psnr_db"] > one["min_psnr_db"] == 40 for one in done.json["sizes"])
