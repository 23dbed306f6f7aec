"""Upper bounds that follow from how far predictions were off."""

import platform
import random

import pytest

from lowtide.core import heap
from lowtide.memory.prediction.calibration import (
    BoundCalibration,
    PredictionResidual,
    PredictionResidualStore,
    RunBounds,
    calibrate_bound,
    run_bounds,
    shipped_calibration,
)

MIB = 1 << 20


def runs(
    count: int, seed: int = 0, fixed: int = 3 * MIB, spread: float = 0.02
) -> list[PredictionResidual]:
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        predicted = chance.randint(50, 2000) * MIB
        measured = int(predicted * (1 + chance.uniform(-spread, spread))) + fixed
        made.append(PredictionResidual(predicted=predicted, measured=measured))
    return made


def test_the_bound_holds_where_it_was_made_and_elsewhere() -> None:
    bound = calibrate_bound(runs(300))
    for seed in range(3):
        others = runs(400, seed=seed + 1)
        held = sum(bound.upper(run.predicted) >= run.measured for run in others)
        assert held / len(others) >= 0.99


def test_the_bound_is_tight() -> None:
    bound = calibrate_bound(runs(300))
    widths = sorted(bound.upper(run.predicted) / run.measured for run in runs(300, seed=9))
    assert 1 <= widths[len(widths) // 2] < 1.10


def test_a_constant_excess_becomes_the_fixed_part() -> None:
    assert calibrate_bound(runs(200, fixed=20 * MIB, spread=0.0)).fixed_bytes >= 16 * MIB
    assert calibrate_bound(runs(200, fixed=0, spread=0.0)).fixed_bytes == 0


def test_one_run_is_covered_and_none_is_an_error() -> None:
    run = PredictionResidual(predicted=100 * MIB, measured=130 * MIB)
    assert calibrate_bound([run]).upper(run.predicted) >= run.measured
    with pytest.raises(ValueError, match="no residuals"):
        calibrate_bound([])


def test_predictions_that_were_too_high_never_lower_the_bound_below_them() -> None:
    high = [PredictionResidual(predicted=100 * MIB, measured=60 * MIB)] * 50
    assert calibrate_bound(high).upper(100 * MIB) >= 100 * MIB


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_calibration_ships(kind: str) -> None:
    bound = shipped_calibration(kind)
    assert isinstance(bound, BoundCalibration)
    assert bound.upper(1000 * MIB) > 1000 * MIB


def test_the_store_keeps_the_newest_and_survives_damage(tmp_path) -> None:
    store = PredictionResidualStore("cpu", "tiled", tmp_path, keep=50)
    for run in runs(70):
        store.add(run)
    assert store.read() == runs(70)[-50:]
    assert store.calibration() == calibrate_bound(store.read())
    (path,) = (tmp_path / "plans").iterdir()
    path.write_bytes(path.read_bytes() + b"not a run\n")
    assert store.read() == []
    store.add(runs(1)[0])
    assert store.read() == runs(1)


def test_few_runs_say_nothing(tmp_path) -> None:
    store = PredictionResidualStore("cpu", "tiled", tmp_path)
    assert store.read() == []
    for run in runs(5):
        store.add(run)
    assert store.calibration() is None


def test_devices_are_calibrated_separately(tmp_path) -> None:
    PredictionResidualStore("cpu", "tiled", tmp_path).add(runs(1)[0])
    assert PredictionResidualStore("cuda:0", "tiled", tmp_path).read() == []


@pytest.fixture
def unknown_heap(tmp_path, monkeypatch) -> None:
    """A heap set in a way that no packaged bound covers, on a machine without runs."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 36))
    monkeypatch.setattr(heap, "_tuned", False)


@pytest.mark.usefixtures("unknown_heap")
def test_kinds_of_runs_are_calibrated_separately() -> None:
    for run in runs(60):
        PredictionResidualStore("cpu", "streamed").add(run)
    assert run_bounds("streamed", "cpu").current_heap == calibrate_bound(runs(60))
    assert run_bounds("tiled", "cpu").current_heap is None


def test_heap_slack_has_its_own_share() -> None:
    plain = BoundCalibration(share=0.1, fixed_bytes=5, count=30, coverage=0.99)
    assert plain.upper(1000, 400) == plain.upper(1000) == 1105
    separate = plain.model_copy(update={"kept_share": 1.0})
    assert separate.upper(1000, 400) == 660 + 5 + 800
    assert separate.upper(1000) == 1105


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    PredictionResidualStore("cpu", "tiled", tmp_path / "file" / "below").add(runs(1)[0])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="bounds are of glibc's heap")
@pytest.mark.parametrize("kind", ["tiled", "streamed"])
@pytest.mark.parametrize("threshold", [None, "65536"], ids=["as it comes", "returning"])
def test_runs_of_this_machine_only_widen_what_ships(tmp_path, monkeypatch, kind, threshold) -> None:
    """So a machine without runs plans as one with many does."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    if threshold is not None:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
    monkeypatch.setattr(heap, "_tuned", False)  # another test may have run the command line
    shipped = run_bounds(kind, "cpu").current_heap
    assert shipped is not None
    assert shipped.families
    store = PredictionResidualStore("cpu", kind)
    for run in runs(60, fixed=0, spread=0.001):
        store.add(run)
    assert run_bounds(kind, "cpu").current_heap == shipped
    for run in runs(60, fixed=0, spread=0.9):
        store.add(run)
    assert run_bounds(kind, "cpu").current_heap == store.calibration()


@pytest.mark.usefixtures("unknown_heap")
def test_an_unknown_heap_has_only_its_own_runs() -> None:
    assert run_bounds("tiled", "cpu").current_heap is None
    assert run_bounds("tiled", "cuda:0") == RunBounds()
