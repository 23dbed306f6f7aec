"""The benchmark grid of predicted and measured memory: its rows, its sums, its worker."""

import importlib
import json
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from lowtide.core.units import GIB, MIB
from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.prediction.result import RuntimeObjectCounts

# The benchmarks are scripts, not a package.
zoo = importlib.import_module("zoo")
memory_grid = importlib.import_module("memory_grid")
memory_summary = importlib.import_module("memory_summary")
memory_peers = importlib.import_module("memory_peers")


def test_the_grid_covers_families_modes_and_precisions():
    grid = zoo.rows()
    families = Counter(row.family for row in grid)
    assert 420 <= len(grid) <= 520
    assert len(families) >= 9
    assert min(families.values()) >= 20
    assert len({row.entry for row in grid}) >= 10
    assert {row.mode for row in grid} == {"inference", "training"}
    assert {row.precision for row in grid} == {"fp32", "bf16", "autocast"}
    assert {row.checkpointing for row in grid} == {"none", "selective", "full"}
    assert max(row.estimated_bytes for row in grid) <= 1.8 * GIB


def test_rows_have_names_of_their_own_and_survive_json():
    grid = zoo.rows()
    assert len({row.name for row in grid}) == len(grid)
    assert [zoo.Row(**json.loads(json.dumps(asdict(row)))) for row in grid] == grid


def test_the_order_is_always_the_same_and_the_beginning_is_a_mixture():
    order = memory_grid.in_order()
    assert order == memory_grid.in_order()
    assert len({row.family for row in order[:60]}) >= 9


def test_the_smallest_row_of_each_kind_is_followed_tensor_by_tensor():
    checked = zoo.checked_rows()
    kinds = {(row.entry, row.mode, row.precision, row.checkpointing) for row in zoo.rows()}
    assert len(checked) == len(kinds)
    assert "conv 448 px x 1, fp32, inference" in checked
    assert "conv 704 px x 1, fp32, inference" not in checked


def smallest(name, mode):
    grid = [row for row in zoo.rows() if row.entry == name and row.mode == mode]
    return min(grid, key=lambda row: (row.precision != "fp32", row.pixels))


_SLOW = ("unet", "drct", "hat", "scunet", "dat", "craft")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in _SLOW else n for n in zoo.ENTRIES],
)
def test_estimated_bytes_of_rows_are_about_right(name):
    pytest.importorskip(zoo.ENTRIES[name].package)
    row = smallest(name, "inference")
    trace = trace_step(row.model(), row.step())
    assert trace.peak_bytes == pytest.approx(row.estimated_bytes, rel=0.25)


@pytest.mark.parametrize("name", ["conv", "lowtide-x2"])
def test_estimated_bytes_of_training_rows_are_about_right(name):
    row = smallest(name, "training")
    trace = trace_step(row.model(), row.step())
    assert trace.peak_bytes == pytest.approx(row.estimated_bytes, rel=0.25)


def test_models_and_inputs_are_the_same_each_time():
    row = zoo.Row("conv", 16, 2, "bf16", "inference")
    one, two = row.model().state_dict(), row.model().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert {tensor.dtype for tensor in one.values()} == {torch.bfloat16}
    assert torch.equal(row.step().inputs[0], row.step().inputs[0])
    assert row.step().inputs[0].dtype == torch.bfloat16


def entries(family, measured, predicted=100 * MIB):
    return [
        {
            "row": f"{family} {at}",
            "family": family,
            "mode": "inference",
            "precision": "fp32",
            "checkpointing": "none",
            "measured_bytes": value,
            "predicted_bytes": predicted,
            "upper_bytes": 2 * predicted,
            "method": "traced",
            "ledger": {},
            "objects": dict.fromkeys(RuntimeObjectCounts.model_fields, 0),
        }
        for at, value in enumerate(measured)
    ]


def test_a_familys_bound_is_calibrated_on_the_others():
    calm = entries("calm", [101 * MIB] * 30)
    wild = entries("wild", [150 * MIB] * 30)
    other = entries("other", [102 * MIB] * 30)
    judged, uppers = memory_summary.held_out([*calm, *wild, *other])
    assert len(judged) == 90
    assert uppers["wild 0"] < 110 * MIB
    assert uppers["calm 0"] >= 150 * MIB
    figures = memory_summary.bounds(wild, uppers)
    assert figures["over_the_bound_percent"] == 100
    assert memory_summary.bounds(calm, uppers)["over_the_bound"] == 0


def test_an_extrapolated_prediction_keeps_its_own_bound():
    rows = [row for name in ("one", "two", "three") for row in entries(name, [90 * MIB])]
    rows[0]["method"] = "probed"
    _, uppers = memory_summary.held_out(rows)
    assert uppers["one 0"] == 200 * MIB
    assert uppers["two 0"] < 110 * MIB


def test_bounds_need_more_than_one_family():
    with pytest.raises(SystemExit, match="two families"):
        memory_summary.held_out(entries("one", [90 * MIB] * 5))


def test_errors_are_percent_of_what_was_measured():
    rows = entries("one", [100 * MIB, 125 * MIB, 80 * MIB])
    figures = memory_summary.errors(rows)
    assert figures["rows"] == 3
    assert figures["median_error_percent"] == 20
    assert figures["largest_error_percent"] == 25
    assert figures["too_low_percent"] == 33.3


def test_peers_say_what_their_sources_say():
    module = torch.nn.Conv2d(1, 1, 1)
    training = zoo.Row("conv", 96, 4, "fp32", "training")
    assert memory_peers.guide_table(training, module) == 8 * GIB
    full = zoo.Row("conv", 96, 4, "fp32", "training", "full")
    assert memory_peers.guide_table(full, module) == 5.5 * GIB
    assert memory_peers.guide_code(training, module) == pytest.approx(2.5 * GIB, rel=0.01)
    decode = zoo.Row("sd-decoder", 32, 1, "bf16", "inference")
    assert memory_peers.comfyui(decode, module) == 2178 * 256 * 256 * 2 + 8
    assert memory_peers.invokeai(decode, module) == 2200 * 256 * 256 * 2 + 8
    assert memory_peers.comfyui(training, module) is None


def test_accelerate_counts_weights_alone():
    pytest.importorskip("accelerate")
    row = zoo.Row("conv", 96, 4, "fp32", "training")
    model = row.model()
    weights = sum(weight.nbytes for weight in model.parameters())
    assert memory_peers.accelerate(row, model) == 4 * weights


def test_torchinfo_says_of_fake_tensors_what_it_says_of_real_ones():
    package = pytest.importorskip("torchinfo")
    row = zoo.Row("conv", 32, 1, "fp32", "inference")
    model = row.model()
    real = package.summary(model, input_data=list(row.step().inputs), verbose=0)
    said = memory_peers.torchinfo(row, model)
    assert said == real.total_input + real.total_output_bytes + real.total_param_bytes


@pytest.fixture
def server():
    server = memory_grid.Server()
    yield server
    server.close()


@pytest.mark.slow
def test_a_row_is_measured_and_predicted_in_a_process_of_its_own(server):
    row = zoo.Row("conv", 256, 1, "fp32", "training", "full")
    figures = server.run(row, "measure", "live", "predict")
    assert "error" not in figures
    assert figures["live_measured_bytes"] == figures["live_bytes"]
    assert figures["measured_bytes"] == pytest.approx(figures["c10_peak_bytes"], rel=0.05)
    assert figures["measured_bytes"] <= figures["upper_bytes"]


@pytest.mark.slow
def test_a_row_that_fails_says_why_and_others_are_measured_after_it(server):
    fails = zoo.Row("esrgan", 32, 1, "fp32", "training", "selective")
    failure = server.run(fails, "measure")
    assert failure["failed"] == "measure"
    assert "changes in place" in failure["error"]
    assert "measured_bytes" in server.run(zoo.Row("conv", 32, 1, "fp32", "inference"), "measure")
