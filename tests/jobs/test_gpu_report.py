"""The rows that wait for a GPU are measured on the CPU, with pictures of a few pixels."""

import argparse
import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.processor import needs_the_compiler

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# The benchmarks are scripts, not a package.
sys.path.append(str(BENCHMARKS))
gpu_report = importlib.import_module("gpu_report")
gpu_rows = importlib.import_module("gpu_rows")

ROWS = {row.name: row for row in gpu_rows.ROWS}
CPU = gpu_rows.Place("cpu", tiny=True)
# What starts processes, or measures a model that no other test does.
SLOW = ("tile loop", "large image, 24 megapixels", "training on two GPUs")
NEEDS_A_GPU = [row.name for row in gpu_rows.ROWS if row.needs(CPU)]


def marked(name):
    marks = [pytest.mark.slow] * (name in SLOW) + [needs_the_compiler] * (name == "compiled")
    return pytest.param(name, marks=marks)


def results_in(folder):
    return gpu_report.ResultFile("gpu_report", about="", environments="each", folder=folder)


def options(minutes, only=("",), retry=False):
    return argparse.Namespace(minutes=minutes, only=only, retry=retry)


# Both large images are one and the same tiny one.
@pytest.mark.parametrize(
    "name",
    [marked(name) for name in ROWS if name not in (*NEEDS_A_GPU, "large image, 96 megapixels")],
)
def test_a_row_is_measured_on_the_cpu_too(name):
    figures = ROWS[name].measure(CPU)
    assert json.loads(json.dumps(figures))
    ways = list(figures.get("ways", {}).values())
    if "within_upper" in (ways or [{}])[0]:
        assert all(way["within_upper"] for way in ways)
        assert all(way["largest_difference_of_255"] <= 1 for way in ways[1:])
    assert figures.get("largest_relative_difference", 0) < 1e-3


@pytest.mark.parametrize("name", NEEDS_A_GPU)
def test_other_rows_say_what_they_need(name):
    assert any(word in ROWS[name].needs(CPU) for word in ("needs a GPU", "not installed"))


def test_all_pending_measurements_have_a_row():
    wanted = "tile loop, large image, compiled, streams, devices, two GPUs, CUDA graphs"
    for word in [*wanted.split(", "), "reserved by VAE", "tests"]:
        assert any(word in name for name in ROWS), word


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--folder", str(tmp_path)])
    assert gpu_report.main() == 2
    assert capsys.readouterr().err == "there is no GPU here; --device cpu --tiny tries the rows\n"
    assert not list(tmp_path.iterdir())


def test_a_failure_is_a_row_and_can_be_tried_again(tmp_path, monkeypatch):
    failing = replace(ROWS["CUDA graphs, fp32"], needs=lambda place: None)
    monkeypatch.setattr(gpu_report, "ROWS", (failing, ROWS["device"]))

    def measured(retry=False):
        results = results_in(tmp_path)
        failed = gpu_report.report(results, CPU, options(minutes=5, retry=retry))
        return failed, {row["row"]: row for row in json.loads(results.path.read_text())["rows"]}

    failed, rows = measured()
    assert failed == 1
    assert list(rows) == ["CUDA graphs, fp32", "device"]
    assert "cpu has no CUDA graphs" in rows["CUDA graphs, fp32"]["error"]
    assert rows["device"]["device"] == "cpu"
    # What was measured is not measured again, unless that is asked for.
    assert measured() == (0, rows)
    failed, again = measured(retry=True)
    assert failed == 1
    assert list(again) == ["device", "CUDA graphs, fp32"]
    assert again["device"] == rows["device"]


def test_it_stops_when_the_time_is_over(tmp_path, capsys):
    results = results_in(tmp_path)
    assert gpu_report.report(results, CPU, options(minutes=0, only=["streams", "device"])) == 0
    assert "3 rows are left, the same command goes on" in capsys.readouterr().out
    assert not results.path.exists()
    with pytest.raises(gpu_report.TimeOverError):
        gpu_report.measure_in_process(ROWS["streams"], CPU, time.monotonic() + 0.2)
