"""Running out of memory in the middle: nothing finished is lost, the result stays the same."""

import gc
import weakref

import numpy as np
import pytest
import torch

from lowtide import OutOfMemoryError
from lowtide.memory.oom import free_exception, is_out_of_memory
from support.toy_models import conv_net, make_plan, network, run_array

ARRAY = np.random.default_rng(1).integers(0, 256, (120, 150, 3), np.uint8)


class Limited(torch.nn.Module):
    """A network on a machine where more than ``limit`` pixels at once do not fit."""

    def __init__(self, limit, scale=2):
        super().__init__()
        self.body, self.limit, self.calls, self.failures = conv_net(scale), limit, 0, 0

    def forward(self, x):
        self.calls += 1
        if x.shape[0] * x.shape[2] * x.shape[3] > self.limit:
            self.failures += 1
            torch.empty(1 << 60, dtype=torch.uint8)  # a real allocation that really fails
        return self.body(x)


def plain(plan):
    return run_array(network(conv_net()), ARRAY, plan)[0]


def test_a_failing_batch_is_halved_and_stays_so():
    plan = make_plan(ARRAY, 4, tile=32, batch=4)
    module = Limited(2 * 32 * 32)
    result, outcome = run_array(network(module), ARRAY, plan)
    np.testing.assert_array_equal(result, plain(plan))
    assert module.failures == 2  # as it was, once more, before it is halved for good
    assert outcome.events == ["out of memory: batch size 2 from here on"]


@pytest.mark.grid(2)
@pytest.mark.parametrize("side", [64, 120])
def test_a_failing_tile_is_divided_and_the_result_is_the_same(side):
    plan = make_plan(ARRAY, 4, tile=side)
    module = Limited(40 * 40)
    result, outcome = run_array(network(module), ARRAY, plan)
    assert np.abs(result.astype(int) - plain(plan)).max() <= 1
    assert any("divided from here" in event for event in outcome.events)


def test_a_whole_run_that_fails_is_divided_when_the_reach_is_known():
    plan = make_plan(ARRAY, 4, strategy="whole")
    result, _ = run_array(network(Limited(80 * 80)), ARRAY, plan)
    assert np.abs(result.astype(int) - plain(plan)).max() <= 1


def test_finished_tiles_are_not_run_again():
    plan = make_plan(ARRAY, 4, tile=32, batch=1)
    module = Limited(10**9)
    run_array(network(module), ARRAY, plan)
    undisturbed = module.calls

    class Failing(Limited):
        def __init__(self, times):
            super().__init__(10**9)
            self.times = times

        def forward(self, x):
            self.limit = 0 if self.calls >= 7 and self.failures < self.times else 10**9
            return super().forward(x)

    module = Failing(1)
    result, outcome = run_array(network(module), ARRAY, plan)
    np.testing.assert_array_equal(result, plain(plan))
    assert module.calls == undisturbed + 1
    assert outcome.events == ["out of memory once: the failed step was repeated and succeeded"]

    module = Failing(2)
    result, _ = run_array(network(module), ARRAY, plan)
    np.testing.assert_allclose(result, plain(plan), atol=1)
    # Two failed calls; from then on each of the remaining tiles is two parts.
    assert module.calls == 7 + 2 + 2 * (undisturbed - 7)


def test_a_tile_that_cannot_be_divided_further_is_a_clear_error():
    plan = make_plan(ARRAY, 4, tile=32)
    with pytest.raises(OutOfMemoryError, match="cannot be divided further") as caught:
        run_array(network(Limited(16)), ARRAY, plan)
    assert "--budget" in str(caught.value.hint)


def test_other_errors_are_not_mistaken_for_memory():
    class Faulty(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_array(network(Faulty()), ARRAY, make_plan(ARRAY, 4, tile=32))


def test_real_allocation_failures_are_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("out of range"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


def test_a_released_error_holds_no_tensor():
    def fail():
        held = torch.zeros(1000)
        watch.append(weakref.ref(held))
        try:
            raise ValueError("first")
        except ValueError as first:
            raise RuntimeError("second") from first

    watch = []
    try:
        fail()
    except RuntimeError as error:
        kept = error
    gc.collect()
    assert watch[0]() is not None  # the traceback holds the frame, the frame the tensor
    free_exception(kept, "cpu")
    assert watch[0]() is None


@pytest.mark.parametrize(
    ("allowed", "message"),
    [((), "cannot be divided"), (("retry",), "cannot be divided"), (("smaller batch",), "divided")],
)
def test_only_what_the_plan_allows_is_tried(allowed, message):
    plan = make_plan(ARRAY, 4, tile=64).with_strategy(recovery=allowed)
    module = Limited(40 * 40)
    with pytest.raises(OutOfMemoryError, match=message):
        run_array(network(module), ARRAY, plan)
    assert module.failures == (2 if "retry" in allowed else 1)


def test_batches_are_divided_into_tiles_where_halving_is_not_allowed():
    plan = make_plan(ARRAY, 4, tile=64, batch=2)
    plan = plan.with_strategy(recovery=("smaller tile",))
    result, outcome = run_array(network(Limited(40 * 40)), ARRAY, plan)
    assert np.abs(result.astype(int) - plain(plan)).max() <= 1
    assert not any("batch size" in event for event in outcome.events)
