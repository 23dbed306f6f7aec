"""Upscaling with a compiled network."""

import numpy as np
import pytest
import torch

import lowtide
from lowtide import ModelError, UsageError
from support.image_folders import statuses
from support.processor import needs_the_compiler


def two_of(source):
    folder = source.parent / "in"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.png").write_bytes(source.read_bytes())
    return folder


def compiled_of(report):
    return [image.plan.compiled for image in report.images]


@needs_the_compiler
def test_it_gives_the_same_image(tmp_path, source, read, expected, crop):
    options = {"compile": "on", "budget": "2GiB"}
    image = lowtide.upscale(source, tmp_path / "on.png", **options).images[0]
    assert image.plan.compiled
    assert "compiled" in image.plan.title
    assert image.accuracy.execution == "exact"
    result = read(tmp_path / "on.png").astype(int)
    assert np.abs(result - expected(crop).astype(int)).max() <= 1
    assert "compiling took" in image.notes[0]
    # It is compiled once for a folder whose images are equally large.
    report = lowtide.upscale(two_of(source), tmp_path / "out", **options)
    assert compiled_of(report) == [True, True]
    assert [len(image.notes) for image in report.images] == [1, 0]
    assert (tmp_path / "out" / "a.png").read_bytes() == (tmp_path / "on.png").read_bytes()


def test_it_is_taken_where_it_is_requested_only(tmp_path, source):
    for more in ({}, {"compile": "off"}):
        plan = lowtide.plan(source, tmp_path / "out.png", budget="2GiB", **more).images[0].plan
        assert not plan.compiled


def test_a_failure_is_an_error_only_if_requested(tmp_path, source, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    options = {"compile": "on", "budget": "2GiB"}
    with pytest.raises(ModelError, match="RuntimeError: no compiler here") as caught:
        lowtide.upscale(source, tmp_path / "on.png", **options)
    assert caught.value.hint == "--compile off"
    # In a plan, perhaps of another machine, it is one of the ways to compute the same.
    plan = tmp_path / "plan.json"
    plan.write_text(lowtide.plan(source, tmp_path / "out.png", **options).model_dump_json())
    report = lowtide.upscale(two_of(source), tmp_path / "out", budget="2GiB", plan_file=plan)
    assert statuses(report) == ["done", "done"]
    for image in report.images:
        assert "no compiler here" in image.events[0]


def test_bands_are_not_compiled():
    with pytest.raises(UsageError, match="not compiled"):
        lowtide.plan("photo.png", "out.png", compile="on", strategy="streamed")
