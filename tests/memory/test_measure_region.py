"""The ledger of a region: what is allocated is in it, within a mebibyte."""

import json
import mmap
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from lowtide import UsageError
from lowtide.core.units import MIB
from lowtide.memory.meter import HostMemoryMeter
from lowtide.memory.plan_store import JsonCacheTable
from lowtide.memory.prediction.estimate import estimate
from lowtide.memory.process_memory import RESIDENT_PEAK
from lowtide.memory.region import RegionUsage, measure
from lowtide.memory.tracing.steps import InferenceStep, TrainingStep
from support.region_blocks import block, values

# Resident memory is of the whole process.
own_process = pytest.mark.own_process
# Rows of an estimate that resident memory shows in full; what the heap keeps differs by run.
SEEN_IN_FULL = {"gradients", "live activations", "workspace"}
TRAINING_PHASES = {"forward", "backward", "optimizer"}


def mib(size: int):
    return pytest.approx(size * MIB, abs=MIB)


@own_process
def test_peak_and_what_is_left():
    # Above the largest block that the heap keeps, so that pages come and go with tensors.
    with measure("cpu") as region:
        first, second = block(48), block(40)
        del first
        third = block(36)
    assert region.peak_bytes == mib(88)
    assert region.retained_bytes == mib(76)
    assert second.nbytes + third.nbytes == 76 * MIB
    assert values(region.ledger) == {"resident memory": region.peak_bytes}
    assert region.usage.total_bytes == region.peak_bytes
    assert region.device == "cpu"


@own_process
def test_small_blocks_that_live_together():
    for sizes in ((1, 1, 1), (20, 10, 15), (1,) * 50):
        with measure("cpu") as region:
            kept = [block(size) for size in sizes]
        assert region.peak_bytes == mib(sum(sizes))
        assert region.retained_bytes == mib(sum(sizes))
        kept.clear()


@own_process
def test_other_libraries_and_threads_count():
    found = []
    with measure("cpu") as region:
        thread = threading.Thread(target=lambda: found.append(np.ones(40 * MIB, np.uint8)))
        thread.start()
        thread.join()
    assert region.peak_bytes == mib(40)
    assert region.retained_bytes == mib(40)


@own_process
def test_earlier_memory_does_not_count():
    before = block(48)
    with measure("cpu") as region:
        after = block(36)
    assert region.peak_bytes == mib(36)
    assert region.retained_bytes == mib(36)
    assert before.nbytes > after.nbytes


@own_process
def test_nested_regions_each_count_their_own():
    with measure("cpu") as outer:
        first = block(36)
        with measure("cpu") as inner:
            second = block(48)
            with measure("cpu") as innermost:
                pass
        del first
        with measure("cpu") as last:
            block(40)
    assert (inner.peak_bytes, inner.retained_bytes) == (mib(48), mib(48))
    assert (innermost.peak_bytes, innermost.retained_bytes) == (mib(0), mib(0))
    assert (last.peak_bytes, last.retained_bytes) == (mib(40), mib(0))
    assert (outer.peak_bytes, outer.retained_bytes) == (mib(88), mib(48))
    assert second.nbytes == 48 * MIB


@own_process
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
    with measure("cpu"):
        pass
    meter = HostMemoryMeter()
    meter.start()
    meter.stop()
    assert inner.peaks()[0] - base < 8 * MIB
    assert outer.peaks()[0] - base == pytest.approx(64 * MIB, rel=0.05)


@own_process
def test_each_phase_has_its_own_peak():
    with measure("cpu") as region:
        kept = block(40)
        region.mark("both")
        other = block(48)
        del other
        region.mark("one")
        time.sleep(0.01)
    expected = {"": mib(40), "both": mib(88), "one": mib(40)}
    assert {phase.name: phase.peak_bytes for phase in region.phases} == expected
    assert region.peak_bytes == max(phase.peak_bytes for phase in region.phases)
    assert kept.nbytes == 40 * MIB


@own_process
@pytest.mark.parametrize("step", [InferenceStep, TrainingStep])
def test_an_estimate_next_to_its_measurement(step, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.SiLU(), nn.Conv2d(32, 8, 3))
    plan = step((torch.rand(4, 8, 512, 512),))
    expected = estimate(model, plan, operators=JsonCacheTable("operators", folder=tmp_path))
    run = plan.prepare(model)
    for _ in range(2):  # the first run loads libraries
        with measure("cpu") as region:
            run(region)
    there = sum(row.value for row in expected.ledger if row.name in ("weights", "inputs"))
    least = sum(row.value for row in expected.ledger if row.name in SEEN_IN_FULL)
    assert least * 0.98 <= region.peak_bytes <= expected.upper_bytes - there
    assert {phase.name for phase in region.phases} in ({"inference"}, TRAINING_PHASES)


def test_a_decorated_function_keeps_its_last_region():
    class Worker:
        @measure("cpu")
        def double(self, mib: int) -> torch.Tensor:
            """Twice as much."""
            return block(2 * mib)

    @measure("cpu")
    def countdown(number: int) -> None:
        if number:
            countdown(number - 1)
        block(40 - number)

    worker = Worker()
    assert worker.double.__doc__ == "Twice as much."
    assert worker.double(3).nbytes == 6 * MIB
    first = worker.double.last_region
    worker.double(20)
    assert worker.double.last_region is not first
    countdown(2)
    assert countdown.last_region.peak_bytes > 0


@own_process
def test_one_meter_can_be_entered_again_and_inside_itself():
    meter = measure("cpu")
    with meter as outer, meter as inner:
        kept = block(40)
    with meter as later:
        pass
    assert (outer.peak_bytes, inner.peak_bytes) == (mib(40), mib(40))
    assert later.peak_bytes == mib(0)
    assert kept.nbytes == 40 * MIB


def test_generators_and_coroutines_are_refused():
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(UsageError, match=function.__name__):
            measure("cpu")(function)


@own_process
def test_an_error_inside_leaves_figures():
    with pytest.raises(ZeroDivisionError), measure("cpu") as region:
        kept = block(40)
        _ = 1 / 0
    assert region.peak_bytes == mib(40)
    assert kept.nbytes == 40 * MIB
    assert not [one for one in threading.enumerate() if one.name == "lowtide-meter"]


def test_figures_come_at_the_end():
    with measure("cpu") as region, pytest.raises(UsageError, match="has not ended"):
        _ = region.peak_bytes
    with pytest.raises(UsageError, match="not open"):
        region.mark("late")
    assert RegionUsage.model_validate_json(region.as_json()) == region.usage
    assert json.loads(region.as_json())["device"] == "cpu"


def test_figures_written_by_an_earlier_release_can_be_read():
    with measure("cpu") as region:
        pass
    earlier = json.loads(region.as_json()) | {"how": "events"}
    assert RegionUsage.model_validate(earlier) == region.usage


def test_a_device_that_cannot_be_measured():
    with pytest.raises(UsageError) as error:
        measure("tpu")
    assert error.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error_when_it_is_used():
    decorated = measure("cuda:0")(lambda: None)
    with pytest.raises(UsageError, match="cuda:0"):
        decorated()


def test_bare_decorator():
    with pytest.raises(UsageError, match="function"):
        measure(lambda: None)  # type: ignore[arg-type]
