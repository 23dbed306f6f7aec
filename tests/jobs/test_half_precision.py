"""The speed of half precision on a CPU, and the note about it."""

import pytest

import lowtide
from lowtide.memory.cpu_half_precision import low_precision_slowdown, slowdown_note


def test_both_precisions_are_measured():
    found = {one["name"]: one for one in low_precision_slowdown()}
    assert set(found) == {"bf16", "fp16"}
    assert all(one[layer] > 0 for one in found.values() for layer in ("linear", "convolution"))


def test_a_precision_is_noted_only_where_nothing_gains():
    for linear, convolution, has_note in (
        (1.1, 1.9, True),
        (2.0, 3.0, True),
        (1.1, 1.15, False),
        (0.5, 0.4, False),
        (0.5, 1.9, False),
    ):
        found = [{"name": "bf16", "linear": linear, "convolution": convolution}]
        note = slowdown_note("bf16", found)
        assert (note is not None) == has_note
        if note is not None:
            assert f"convolutions take {convolution:.2g} times" in note
            assert f"linear layers {linear:.2g} times" in note
    assert slowdown_note("fp32") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_says_it_beforehand(source, tmp_path, precision):
    report = lowtide.plan(source, tmp_path / "out.png", precision=precision)
    assert report.images[0].notes == [note for note in [slowdown_note(precision)] if note]


def test_the_run_says_it_before_anything_is_measured(source, tmp_path, private_cache):
    events = []
    lowtide.plan(source, tmp_path / "out.png", precision="bf16", progress=events.append)
    note = slowdown_note("bf16")
    phases = [one.phase for one in events]
    assert [one.name for one in events if one.phase == "slow"] == [note] * bool(note)
    if note and "probe" in phases:
        assert phases.index("slow") < phases.index("probe")
