"""Upscaling with a recorded network; the CPU stands in for the GPU."""

import pytest
import torch

import lowtide
from lowtide import UsageError
from lowtide.jobs.images import prepare
from support.cuda_graphs import graphs_on_the_cpu
from support.image_folders import statuses

OPTIONS = {"cuda_graphs": True, "budget": "512MiB"}


@pytest.fixture
def graphs(monkeypatch):
    """The CPU as a device that captures graphs, and counts how many."""
    monkeypatch.setattr(prepare, "require_cuda_graphs", lambda device: None)
    return graphs_on_the_cpu(monkeypatch)


@pytest.mark.parametrize("options", [{"strategy": "whole"}, {"tile": 32}], ids=str)
def test_it_is_the_same_file(tmp_path, source, graphs, options):
    lowtide.upscale(source, tmp_path / "plain.png", budget="512MiB", **options)
    image = lowtide.upscale(source, tmp_path / "out.png", **OPTIONS, **options).images[0]
    assert image.plan.cuda_graph
    assert "as a CUDA graph" in image.plan.title
    assert image.accuracy.execution == "exact"
    assert "capturing a CUDA graph took" in image.notes[0]
    assert graphs.captured == 1
    assert (tmp_path / "out.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_a_folder_is_recorded_once_for_each_size(tmp_path, save, crop, graphs):
    folder = tmp_path / "in"
    for name, height in (("a", 24), ("b", 24), ("c", 32), ("d", 24)):
        save(folder / f"{name}.png", crop[:height, :40])
    report = lowtide.upscale(folder, tmp_path / "out", strategy="whole", **OPTIONS)
    assert statuses(report) == ["done"] * 4
    # A graph holds memory, so that no more than one is kept.
    assert [len(image.notes) for image in report.images] == [1, 0, 1, 1]
    assert graphs.captured == 3


def test_a_plan_is_replayed_with_its_graph(tmp_path, source, graphs):
    plan = tmp_path / "plan.json"
    plan.write_text(lowtide.plan(source, tmp_path / "out.png", **OPTIONS).model_dump_json())
    image = lowtide.upscale(source, tmp_path / "out.png", plan_file=plan, budget="512MiB").images[0]
    assert image.plan.cuda_graph
    assert graphs.captured == 1
    with pytest.raises(UsageError, match="--plan says how to run"):
        lowtide.upscale(source, tmp_path / "out.png", plan_file=plan, **OPTIONS)


def test_absent_gpus_are_planned_for(tmp_path, source):
    plans = [
        lowtide.plan(
            source, tmp_path / "out.png", device="rtx3060-12gb", tile=64, cuda_graphs=graphs
        )
        .images[0]
        .plan
        for graphs in (False, True)
    ]
    assert [plan.cuda_graph for plan in plans] == [False, True]
    names = [row.name for row in plans[1].ledger]
    assert "CUDA graph" in names
    assert plans[1].predicted_bytes > plans[0].predicted_bytes


def test_the_cpu_has_none(tmp_path, source):
    for job in (lowtide.upscale, lowtide.plan):
        with pytest.raises(UsageError, match="cpu has no CUDA graphs"):
            job(source, tmp_path / "out.png", cuda_graphs=True, device="cpu")


REFUSED = [
    ({"strategy": "streamed"}, "streamed networks"),
    ({"compile": "on"}, "compiled networks"),
    ({"devices": "cuda:0,cuda:1"}, "several devices"),
    ({"model": "a.onnx"}, "ONNX files"),
]


def test_networks_that_cannot_be_recorded_are_refused(tmp_path, source):
    for options, match in REFUSED:
        with pytest.raises(UsageError, match=match):
            lowtide.upscale(source, tmp_path / "out.png", cuda_graphs=True, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_replays_what_it_computes(tmp_path, source, read, precision):
    for name, graphs in (("plain", False), ("out", True)):
        image = lowtide.upscale(
            source,
            tmp_path / f"{name}.png",
            device="cuda:0",
            tile=32,
            precision=precision,
            cuda_graphs=graphs,
        ).images[0]
        assert image.plan.cuda_graph == graphs
        assert image.memory.peak_bytes <= image.memory.upper_bytes
    difference = read(tmp_path / "plain.png").astype(int) - read(tmp_path / "out.png")
    assert abs(difference).max() <= (precision != "fp32")
