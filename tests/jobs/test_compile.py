"""Upscaling with a compiled network."""

import numpy as np
import pytest

import lowtide
from lowtide import UsageError
from lowtide.core.errors import ModelError
from lowtide.jobs import network_compile
from lowtide.streaming.specialize.shape_specialized import SpecializationGain
from lowtide.streaming.specialize.torch_compile import CompileCache
from support.image_folders import statuses

PAYS = SpecializationGain(ratio=0.01, warmup_seconds=0.0, host_bytes=64 << 20)


@pytest.fixture
def known(model):
    """What is known of compiling lowtide-x2 is forgotten afterwards."""
    store, sha256 = CompileCache("cpu"), model.descriptor.sha256
    yield lambda facts: store.put(sha256, "fp32", facts)
    store.put(sha256, "fp32", SpecializationGain(ratio=2.0, warmup_seconds=60.0))


def two_of(source):
    folder = source.parent / "in"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.png").write_bytes(source.read_bytes())
    return folder


def compiled_of(report):
    return [image.plan.compiled for image in report.images]


def test_it_gives_the_same_image_and_its_gain_is_cached(
    tmp_path, source, read, expected, crop, model, known
):
    image = lowtide.upscale(source, tmp_path / "on.png", compile="on", budget="2GiB").images[0]
    assert image.plan.compiled
    assert image.accuracy.execution == "exact"
    result = read(tmp_path / "on.png").astype(int)
    assert np.abs(result - expected(crop).astype(int)).max() <= 1
    assert "compiling took" in image.notes[0]
    facts = CompileCache("cpu").get(model.descriptor.sha256, "fp32")
    assert facts.ratio > 0
    known(PAYS)
    # It is compiled once for a folder whose images are equally large.
    report = lowtide.upscale(two_of(source), tmp_path / "out", budget="2GiB")
    assert compiled_of(report) == [True, True]
    assert [len(image.notes) for image in report.images] == [1, 0]
    assert (tmp_path / "out" / "a.png").read_bytes() == (tmp_path / "on.png").read_bytes()


@pytest.mark.slow
@pytest.mark.own_process
def test_memory_is_that_of_compiling_whatever_the_program_lets_go_of(tmp_path, source, model):
    held = [np.ones(1 << 30, np.uint8)]

    def let_go(moment):
        if moment.phase == "compile":
            held.clear()

    lowtide.upscale(source, tmp_path / "on.png", compile="on", budget="2GiB", progress=let_go)
    assert not held
    facts = CompileCache("cpu").get(model.descriptor.sha256, "fp32")
    assert 10 << 20 < facts.host_bytes < 1 << 30


def test_it_is_not_taken_where_it_costs_more_or_nothing_is_known(tmp_path, source, known):
    for facts in (
        SpecializationGain(ratio=0.5, warmup_seconds=60.0),
        SpecializationGain(ratio=1.2, warmup_seconds=0.0),
    ):
        known(facts)
        report = lowtide.upscale(source, tmp_path / "auto.png", budget="2GiB", force=True)
        assert compiled_of(report) == [False]
    known(PAYS)
    for more in ({"compile": "off"}, {"budget": "96MiB"}):
        given = {"budget": "2GiB", **more}
        report = lowtide.upscale(source, tmp_path / "auto.png", force=True, **given)
        assert compiled_of(report) == [False]


def test_a_failure_is_an_error_only_if_requested(tmp_path, source, known, monkeypatch):
    def fail(network, shape):
        raise ModelError("no compiler here")

    monkeypatch.setattr(network_compile, "compile_for", fail)
    known(PAYS)
    report = lowtide.upscale(two_of(source), tmp_path / "out", budget="2GiB")
    assert statuses(report) == ["done", "done"]
    assert [image.events for image in report.images] == [["no compiler here"], []]
    with pytest.raises(ModelError, match="no compiler"):
        lowtide.upscale(source, tmp_path / "on.png", budget="2GiB", compile="on")


def test_a_folder_goes_on_as_it_began(tmp_path, source, known):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.png").write_bytes(source.read_bytes())
    known(SpecializationGain(ratio=2.0, warmup_seconds=60.0))
    lowtide.upscale(folder, tmp_path / "out", budget="2GiB")
    known(PAYS)
    (folder / "b.png").write_bytes(source.read_bytes())
    report = lowtide.upscale(folder, tmp_path / "out", budget="2GiB")
    assert statuses(report) == ["skipped", "done"]
    assert not report.images[1].plan.compiled


def test_bands_are_not_compiled():
    with pytest.raises(UsageError, match="not compiled"):
        lowtide.plan("photo.png", "out.png", compile="on", strategy="streamed")
