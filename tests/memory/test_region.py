"""The ledger of a region: what is allocated is in it, to the byte where the way allows."""

import json
import mmap
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.units import MIB
from lowtide.memory.estimating.estimate import estimate
from lowtide.memory.estimating.priced import TITLES
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.measuring.compare import compare
from lowtide.memory.measuring.live import live_peak_bytes
from lowtide.memory.measuring.region import RegionUsage, measure
from lowtide.memory.meter import HostMeter
from lowtide.memory.processes import RESIDENT_PEAK
from lowtide.memory.store import OperatorStore
from lowtide.memory.tracing.steps import InferenceStep, TrainingStep

CPU_WAYS = ("events", "storages", "resident")
PRECISE = ("events", "storages")
SEEN_BY_EVENTS = {*TITLES.values(), "scratch"}


def block(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8)


def values(rows) -> dict[str, int]:
    assert all(row.origin == "measured" and row.upper >= row.value for row in rows)
    return {row.name: row.value for row in rows}


@pytest.mark.parametrize("how", CPU_WAYS)
def test_peak_and_what_is_left(how):
    # Above the largest block that the heap keeps, so that pages come and go with tensors.
    with measure("cpu", how) as region:
        first, second = block(48), block(40)
        del first
        third = block(36)
    tolerance = 0 if how in PRECISE else MIB
    assert region.peak_bytes == pytest.approx(88 * MIB, abs=tolerance)
    assert region.held_bytes == pytest.approx(second.nbytes + third.nbytes, abs=tolerance)
    assert sum(values(region.ledger).values()) == region.usage.total_bytes == region.peak_bytes
    assert (region.device, region.how) == ("cpu", how)


@pytest.mark.parametrize("how", PRECISE)
def test_what_was_there_before_counts_for_nothing(how):
    before = block(4)
    with measure("cpu", how) as region:
        after = block(1)
        del before
        last = block(2)
    assert region.peak_bytes == region.held_bytes == after.nbytes + last.nbytes


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
    assert region.peak_bytes == region.held_bytes == kept.nbytes()


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
    assert (inner.peak_bytes, inner.held_bytes) == (second.nbytes, second.nbytes)
    assert (innermost.peak_bytes, innermost.held_bytes) == (0, 0)
    assert (last.peak_bytes, last.held_bytes) == (MIB, 0)
    assert outer.peak_bytes == 7 * MIB
    assert outer.held_bytes == second.nbytes + third.nbytes


def test_what_resets_the_kernels_mark_inside_a_region_does_not_hide_its_peak():
    """No sample is taken here, so that the mark alone knows of the peak."""
    outer, inner = RESIDENT_PEAK.reading(), RESIDENT_PEAK.reading()
    if not outer.restart():
        pytest.skip("this system does not let the mark be reset")
    base = outer.peaks()[0]
    # Pages of its own, whatever the C heap kept of earlier tests.
    with mmap.mmap(-1, 64 * MIB) as spike:
        np.frombuffer(spike, np.uint8)[:] = 1
    inner.restart()
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
        "weights": weights, "gradients": weights, "inputs": batch.nbytes,
        "live activations": 4 * MIB,
    }  # fmt: skip
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
        "weights": weights.nbytes, "inputs": batch.nbytes,
        "live activations and scratch": result.nbytes,
    }  # fmt: skip
    assert region.peak_bytes == result.nbytes
    assert region.usage.total_bytes == 6 * MIB


@pytest.mark.parametrize("step", [InferenceStep, TrainingStep])
def test_an_estimate_beside_its_measurement(step, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.SiLU(), nn.Conv2d(32, 8, 3))
    plan = step((torch.rand(1, 8, 96, 96),))
    expected = estimate(model, plan, operators=OperatorStore(tmp_path))
    run = plan.prepare(model)
    for _ in range(2):  # the second training step has the optimizer's state
        with measure("cpu") as region:
            region.label(model.parameters(), "weights")
            region.label(plan.inputs, "inputs")
            run(region)
    assert "within the bound" in compare(expected.ledger, region.ledger)
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
    assert worker.double(3).nbytes == worker.double.last_region.held_bytes == 6 * MIB
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
def test_what_cannot_be_measured(device, how):
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


class TestOtherProfilers:
    def test_one_around_the_region(self):
        with (
            torch.autograd.profiler.profile(use_kineto=True),
            pytest.raises(UsageError, match="another profiler"),
            measure("cpu"),
        ):
            pass

    def test_one_inside_the_region(self):
        with pytest.raises(LowtideError, match="events were lost"), measure("cpu") as region:
            with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True):
                block(1)
            block(2)
        with pytest.raises(UsageError, match="gave no figures"):
            _ = region.usage

    def test_one_inside_nested_regions(self):
        with pytest.raises(LowtideError, match="events were lost"), measure("cpu"):
            inner = measure("cpu")
            inner.__enter__()
            with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True):
                block(1)
            with pytest.raises(LowtideError, match="events were lost"):
                inner.__exit__(None, None, None)

    def test_other_ways_do_not_mind(self):
        with torch.autograd.profiler.profile(use_kineto=True), measure("cpu", "storages") as region:
            block(1)
        assert region.peak_bytes == MIB

    @pytest.fixture(autouse=True)
    def afterwards_all_works_again(self):
        yield
        assert live_peak_bytes(lambda: block(3)) == 3 * MIB


def test_events_of_one_thread_at_a_time():
    problems = []

    def other():
        try:
            live_peak_bytes(lambda: None)
        except UsageError as error:
            problems.append(error)

    with measure("cpu") as region:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        kept = block(1)
    assert "one thread" in str(problems[0])
    assert region.peak_bytes == kept.nbytes


def test_a_region_left_in_another_thread_does_not_block_the_next():
    meter = measure("cpu")
    region = meter.__enter__()
    problems = []

    def leave():
        try:
            region._end()
        except UsageError as error:
            problems.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "one thread" in str(problems[0])
    assert live_peak_bytes(lambda: block(2)) == 2 * MIB
    with pytest.raises(LowtideError, match="one thread"):
        meter.__exit__(None, None, None)


class Inside(torch.autograd.Function):
    """Calls something in the backward pass."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


def backward(call) -> None:
    Inside.apply(torch.ones(2, requires_grad=True), call).sum().backward()


def test_a_region_within_a_backward_pass():
    peaks = []
    backward(lambda: peaks.append(live_peak_bytes(lambda: block(2))))
    assert peaks == [2 * MIB]
    with measure("cpu") as region:
        with pytest.raises(UsageError, match="backward"):
            backward(lambda: live_peak_bytes(lambda: block(2)))
        kept = block(3)
    assert region.peak_bytes == pytest.approx(kept.nbytes, abs=1000)


def test_lowtides_own_probes_run_inside_a_region():
    with measure("cpu") as region:
        assert live_peak_bytes(lambda: block(2)) == 2 * MIB
        kept = block(1)
    assert (region.peak_bytes, region.held_bytes) == (2 * MIB, kept.nbytes)


def test_the_profilers_greetings_are_not_printed_and_all_else_is(capfd):
    with measure("cpu"):
        print("from inside", file=sys.stderr)
    assert capfd.readouterr().err == "from inside\n"


@pytest.mark.slow
def test_no_warning_of_the_first_block_from_before():
    code = (
        "import torch; from lowtide.memory.measuring.region import measure\n"
        "before = [torch.ones(1) for _ in range(10)]\n"
        "with measure('cpu'): del before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def row(name: str, value: int, upper: int | None = None) -> LedgerRow:
    return LedgerRow(
        name=name, place="device", value=value, upper=value if upper is None else upper,
        origin="known",
    )  # fmt: skip


def test_the_table_of_two_ledgers():
    predicted = [row("weights", 2 * MIB), row("scratch", MIB, 2 * MIB), row("weights", MIB)]
    assert compare(predicted, [row("weights", 3 * MIB), row("context", 3 * MIB)]).splitlines() == [
        "         predicted   at most  measured",
        "weights   3.00 MiB  3.00 MiB  3.00 MiB",
        "scratch   1.00 MiB  2.00 MiB         –",
        "context          –         –  3.00 MiB",
        "total     4.00 MiB  5.00 MiB  6.00 MiB",
        "measured / predicted 1.500, over the bound by 1.00 MiB",
    ]
    assert compare(predicted, [row("weights", MIB)]).endswith("0.250, within the bound")
    assert compare([], []).endswith("\nwithin the bound")


class SimulatedCuda:
    """The counters of a device of 8 GiB with a context of 300 MiB, as ``torch.cuda`` has them."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.most = [0, 0], [0, 0]
        places = (("memory_allocated", 0), ("memory_reserved", 1))
        for name, index in places:
            monkeypatch.setattr(torch.cuda, name, lambda _, i=index: self.now[i])
            monkeypatch.setattr(torch.cuda, f"max_{name}", lambda _, i=index: self.most[i])
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: self.reset())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        total = 8192 * MIB
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda _: (total - self.now[1] - 300 * MIB, total)
        )

    def reset(self) -> None:
        self.most = list(self.now)

    def use(self, allocated: int, reserved: int) -> None:
        self.now = [allocated * MIB, reserved * MIB]
        self.most = [max(pair) for pair in zip(self.most, self.now, strict=True)]


def test_the_rows_of_a_simulated_cuda_device(monkeypatch):
    device = SimulatedCuda(monkeypatch)
    device.use(900, 1000)
    device.use(100, 1000)
    with measure(torch.device("cuda", 0)) as outer:
        device.use(400, 1200)
        outer.mark("second")
        with measure("cuda:0") as inner:
            device.use(150, 1300)
            device.use(130, 600)
        device.use(120, 600)
    assert [phase.peak_bytes for phase in outer.phases] == [300 * MIB, 300 * MIB]
    assert (outer.peak_bytes, outer.held_bytes) == (300 * MIB, 20 * MIB)
    assert values(outer.ledger) == {
        "held before": 100 * MIB, "live activations and scratch": 300 * MIB,
        "allocator": 900 * MIB, "context": 300 * MIB,
    }  # fmt: skip
    # The inner region starts with 400 MiB, which go before they are exceeded.
    assert (inner.peak_bytes, inner.held_bytes) == (0, 0)
    assert inner.usage.total_bytes == 1600 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
class TestCuda:
    def block(self, mib: int) -> torch.Tensor:
        return torch.ones(mib * MIB, dtype=torch.uint8, device="cuda:0")

    @pytest.fixture(autouse=True)
    def empty(self):
        torch.cuda.init()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated("cuda:0")

    def test_rows_of_what_the_process_holds(self, empty):
        before = self.block(32)
        with measure("cuda:0") as region:
            first, second = self.block(64), self.block(128)
            del first
        rows = values(region.ledger)
        assert region.peak_bytes == 192 * MIB
        assert region.held_bytes == second.nbytes
        assert rows["held before"] == before.nbytes + empty
        assert rows["live activations and scratch"] == region.peak_bytes
        assert rows["context"] > 50 * MIB
        reserved = torch.cuda.max_memory_reserved("cuda:0")
        assert region.usage.total_bytes - rows["context"] == reserved

    def test_phases_and_inner_regions_leave_the_outer_peak_alone(self):
        with measure("cuda:0") as outer:
            self.block(256)
            outer.mark("small")
            with measure("cuda:0") as inner:
                self.block(16)
        assert outer.peak_bytes == 256 * MIB
        assert inner.peak_bytes == 16 * MIB
        assert [phase.peak_bytes for phase in outer.phases] == [256 * MIB, 16 * MIB]
