"""The ledger of a region: what is allocated is in it, to the byte where the way allows."""

import json
import mmap
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.core.errors import UsageError
from lowtide.core.units import MIB
from lowtide.memory.cache import WorkspaceCache
from lowtide.memory.measurement.region import RegionUsage, measure
from lowtide.memory.meter import HostMeter
from lowtide.memory.prediction.estimate import estimate
from lowtide.memory.prediction.result import KIND_TITLES
from lowtide.memory.process_memory import RESIDENT_PEAK
from lowtide.memory.tracing.steps import InferenceStep, TrainingStep
from support.region_blocks import block, values

# Resident memory is of the whole process.
RESIDENT = pytest.param("resident", marks=pytest.mark.own_process)
CPU_WAYS = ("events", "storages", RESIDENT)
PRECISE = ("events", "storages")
SEEN_BY_EVENTS = {*KIND_TITLES.values(), "workspace"}


@pytest.mark.parametrize("how", CPU_WAYS)
def test_peak_and_what_is_left(how):
    # Above the largest block that the heap keeps, so that pages come and go with tensors.
    with measure("cpu", how) as region:
        first, second = block(48), block(40)
        del first
        third = block(36)
    tolerance = 0 if how in PRECISE else MIB
    assert region.peak_bytes == pytest.approx(88 * MIB, abs=tolerance)
    assert region.retained_bytes == pytest.approx(second.nbytes + third.nbytes, abs=tolerance)
    assert sum(values(region.ledger).values()) == region.usage.total_bytes == region.peak_bytes
    assert (region.device, region.how) == ("cpu", how)


@pytest.mark.parametrize("how", PRECISE)
def test_earlier_memory_does_not_count(how):
    before = block(4)
    with measure("cpu", how) as region:
        after = block(1)
        del before
        last = block(2)
    assert region.peak_bytes == region.retained_bytes == after.nbytes + last.nbytes


def test_events_see_scratch_that_storages_do_not():
    image, kernel = torch.ones(1, 8, 256, 256), torch.ones(8, 8, 3, 3)
    peaks = {}
    for how in PRECISE:
        with measure("cpu", how) as region, torch.inference_mode():
            result = F.conv2d(image.double(), kernel.double(), padding=1)
        peaks[how] = region.peak_bytes
    # In fp64 the library multiplies matrices of unfolded windows, nine times as large.
    assert peaks["events"] >= peaks["storages"] + 9 * result.nbytes


def test_a_block_from_before_with_the_address_of_an_old_one():
    """Its size is then reported wrongly, and it must not count at all."""
    with measure("cpu"):
        old = [torch.UntypedStorage(5008) for _ in range(50)]
    addresses = {storage.data_ptr() for storage in old}
    del old
    new = [torch.UntypedStorage(5000) for _ in range(50)]
    if not addresses & {storage.data_ptr() for storage in new}:
        pytest.skip("this heap does not use addresses again")
    with measure("cpu") as region:
        del new
        kept = torch.UntypedStorage(300)
    assert region.peak_bytes == region.retained_bytes == kept.nbytes()


@pytest.mark.parametrize("how", PRECISE)
def test_nested_regions_each_count_their_own(how):
    with measure("cpu", how) as outer:
        first = block(1)
        with measure("cpu", how) as inner:
            second = block(2)
            del first
            with measure("cpu", how) as innermost:
                pass
        third = block(4)
        with measure("cpu", how) as last:
            block(1)
    assert (inner.peak_bytes, inner.retained_bytes) == (second.nbytes, second.nbytes)
    assert (innermost.peak_bytes, innermost.retained_bytes) == (0, 0)
    assert (last.peak_bytes, last.retained_bytes) == (MIB, 0)
    assert outer.peak_bytes == 7 * MIB
    assert outer.retained_bytes == second.nbytes + third.nbytes


@pytest.mark.own_process
def test_a_reset_of_the_kernels_mark_does_not_hide_a_peak():
    """No sample is taken here, so that the mark alone knows of the peak."""
    outer, inner = RESIDENT_PEAK.reader(), RESIDENT_PEAK.reader()
    if not outer.reset():
        pytest.skip("this system does not let the mark be reset")
    base = outer.peaks()[0]
    # Pages of its own, whatever the C heap kept of earlier tests.
    with mmap.mmap(-1, 64 * MIB) as spike:
        np.frombuffer(spike, np.uint8)[:] = 1
    inner.reset()
    with measure("cpu", "resident"):
        pass
    meter = HostMeter()
    meter.start()
    meter.stop()
    assert inner.peaks()[0] - base < 8 * MIB
    assert outer.peaks()[0] - base == pytest.approx(64 * MIB, rel=0.05)


@pytest.mark.parametrize("how", CPU_WAYS)
def test_each_phase_has_its_own_peak(how):
    with measure("cpu", how) as region:
        kept = block(40)
        region.mark("both")
        other = block(48)
        del other
        region.mark("one")
        time.sleep(0.01)
    expected = {"": 40 * MIB, "both": 88 * MIB, "one": 40 * MIB}
    found = {phase.name: phase.peak_bytes for phase in region.phases}
    assert found == {name: pytest.approx(size, abs=MIB) for name, size in expected.items()}
    assert region.peak_bytes == max(found.values())
    assert kept.nbytes == 40 * MIB


def test_storages_have_a_row_for_each_kind():
    model, batch = nn.Linear(256, 512), torch.ones(64, 256)
    weights = sum(p.nbytes for p in model.parameters())
    with measure("cpu", "storages") as region:
        region.label(model.parameters(), "weights")
        region.label([batch], "inputs")
        model(batch).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        region.label(gradients, "gradients")
        torch.ones(MIB)
    assert values(region.ledger) == {
        "weights": weights,
        "gradients": weights,
        "inputs": batch.nbytes,
        "live activations": 4 * MIB,
    }
    # Above the start are only the gradients and the last tensor.
    assert region.peak_bytes == weights + 4 * MIB
    assert region.trace is not None
    assert region.trace.peak_bytes == region.usage.total_bytes


def test_events_add_labeled_tensors_of_before_to_the_ledger():
    weights, batch = block(3), block(2)
    with measure("cpu", "events") as region:
        result = block(1)
        region.label([weights], "weights")
        region.label([batch, batch[: MIB // 2], result], "inputs")
    assert values(region.ledger) == {
        "weights": weights.nbytes,
        "inputs": batch.nbytes,
        "live activations and workspace": result.nbytes,
    }
    assert region.peak_bytes == result.nbytes
    assert region.usage.total_bytes == 6 * MIB


@pytest.mark.parametrize("step", [InferenceStep, TrainingStep])
def test_an_estimate_next_to_its_measurement(step, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.SiLU(), nn.Conv2d(32, 8, 3))
    plan = step((torch.rand(1, 8, 96, 96),))
    expected = estimate(model, plan, operators=WorkspaceCache(tmp_path))
    run = plan.prepare(model)
    for _ in range(2):  # the second training step has the optimizer's state
        with measure("cpu") as region:
            region.label(model.parameters(), "weights")
            region.label(plan.inputs, "inputs")
            run(region)
    assert sum(row.value for row in region.ledger) <= sum(row.upper for row in expected.ledger)
    # Memory events see tensors and scratch, not what pages and the process add.
    seen = sum(row.value for row in expected.ledger if row.name in SEEN_BY_EVENTS)
    assert region.usage.total_bytes == pytest.approx(seen, rel=0.02)


def test_a_decorated_function_keeps_its_last_region():
    class Worker:
        @measure("cpu", "storages")
        def double(self, mib: int) -> torch.Tensor:
            """Twice as much."""
            return block(2 * mib)

    @measure("cpu")
    def countdown(number: int) -> None:
        if number:
            countdown(number - 1)
        block(4 - number)

    worker = Worker()
    assert worker.double.__doc__ == "Twice as much."
    assert worker.double(3).nbytes == worker.double.last_region.retained_bytes == 6 * MIB
    countdown(3)
    countdown(2)
    assert countdown.last_region.peak_bytes == 4 * MIB


def test_one_meter_can_be_entered_again_and_inside_itself():
    meter = measure("cpu")
    with meter as outer, meter as inner:
        kept = block(1)
    with meter as later:
        pass
    assert outer.peak_bytes == inner.peak_bytes == kept.nbytes
    assert later.peak_bytes == 0


def test_generators_and_coroutines_are_refused():
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(UsageError, match=function.__name__):
            measure("cpu")(function)


@pytest.mark.parametrize("how", CPU_WAYS)
def test_an_error_inside_leaves_figures_and_no_session_behind(how):
    with pytest.raises(ZeroDivisionError), measure("cpu", how) as region:
        kept = block(40)
        _ = 1 / 0
    assert region.peak_bytes == pytest.approx(kept.nbytes, abs=MIB)
    with measure("cpu") as after:
        pass
    assert after.peak_bytes == 0


def test_figures_come_at_the_end():
    with measure("cpu") as region, pytest.raises(UsageError, match="has not ended"):
        _ = region.peak_bytes
    with pytest.raises(UsageError, match="not open"):
        region.mark("late")
    assert RegionUsage.model_validate_json(region.as_json()) == region.usage
    assert json.loads(region.as_json())["how"] == "events"


@pytest.mark.parametrize(
    ("device", "how"), [("tpu", None), ("cpu", "allocator"), ("cuda:0", "events")]
)
def test_runs_that_cannot_be_measured(device, how):
    with pytest.raises(UsageError) as error:
        measure(device, how)
    assert error.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error_when_it_is_used():
    decorated = measure("cuda:0")(lambda: None)
    with pytest.raises(UsageError, match="cuda:0"):
        decorated()


def test_bare_decorator():
    with pytest.raises(UsageError, match="function"):
        measure(lambda: None)  # type: ignore[arg-type]
