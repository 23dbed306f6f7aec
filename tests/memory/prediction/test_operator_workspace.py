"""Scratch of operators: measured as the profiler sees it, few times, and remembered."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.plan_store import JsonCacheTable
from lowtide.memory.prediction.cpu import (
    CpuWorkspaceMeter,
    measure_operator,
    peak_with_workspace,
)
from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.prediction.operator_costs import (
    largest_workspace_ratio,
    needs_no_workspace,
    operand_bytes,
    operator_signature,
)
from lowtide.memory.tracing.fake import model_tensors
from lowtide.memory.tracing.steps import (
    InferenceStep,
    NullStepObserver,
    TrainingStep,
    input_tensors,
)
from lowtide.memory.tracing.trace import describe_argument
from support.stored_tables import empty_table
from support.workspace_models import _aten, convolution


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 12, 3, padding=1)

    def forward(self, x):
        return F.pixel_shuffle(self.last(F.silu(self.first(x))), 2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_peak_is_what_the_profiler_sees(training: bool, layout: torch.memory_format) -> None:
    model = Net().to(memory_format=layout)
    inputs = (torch.rand(1, 3, 96, 104).contiguous(memory_format=layout),)
    step = TrainingStep(inputs, optimizer="sgd") if training else InferenceStep(inputs)
    scratch = CpuWorkspaceMeter(empty_table())
    predicted = peak_with_workspace(trace_step(model, step), scratch.operator_peak)
    run = step.prepare(model)
    run(NullStepObserver())
    held = sum(tensor.nbytes for tensor in [*model_tensors(model), *input_tensors(step)])
    seen = live_peak_bytes(lambda: run(NullStepObserver())) + held
    assert predicted.total == pytest.approx(seen, rel=2e-3)
    assert predicted.total >= predicted.live


def test_an_operator_is_measured_once_for_a_signature(tmp_path) -> None:
    store = JsonCacheTable("operators", folder=tmp_path)
    scratch = CpuWorkspaceMeter(store)
    first = scratch.operator_peak(convolution())
    assert scratch.operator_peak(convolution()) == first
    assert scratch.measured == 1
    store.save()
    again = CpuWorkspaceMeter(JsonCacheTable("operators", folder=tmp_path))
    assert again.operator_peak(convolution()) == first
    assert again.measured == 0


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_from_a_few_rows_is_as_measured(stride, channels_last, dtype) -> None:
    call = convolution(1000, stride=stride, channels_last=channels_last, dtype=dtype)
    scratch = CpuWorkspaceMeter(empty_table())
    predicted = scratch._extrapolated(call)
    assert predicted == pytest.approx(measure_operator(call), rel=0.03)


def test_nothing_over_the_limit_is_run_and_that_is_said() -> None:
    scratch = CpuWorkspaceMeter(empty_table(), limit_bytes=1000)
    call = convolution()
    assert scratch.operator_peak(call) == largest_workspace_ratio(call) * operand_bytes(call)
    assert [name for name, _ in scratch.assumed.values()] == ["convolution.default"]
    assert scratch.measured == 0


def test_sizes_strides_types_and_settings_make_a_signature() -> None:
    kinds = [
        convolution(),
        convolution(65),
        convolution(channels_last=True),
        convolution(stride=2),
        convolution(dtype=torch.bfloat16),
    ]
    assert len({operator_signature(call) for call in kinds}) == len(kinds)
    assert operator_signature(convolution()) == operator_signature(convolution())


def test_elementwise_operators_of_one_type_need_no_measuring() -> None:
    one, low = (
        describe_argument(torch.empty(8, 8)),
        describe_argument(torch.empty(8, 8, dtype=torch.bfloat16)),
    )
    assert needs_no_workspace((_aten.add.Tensor, (one, one), {}))
    assert not needs_no_workspace((_aten.add.Tensor, (one, low), {}))
    assert not needs_no_workspace(convolution())


def test_operators_that_cannot_reach_the_peak_are_not_measured() -> None:
    trace = trace_step(Net(), TrainingStep((torch.rand(1, 3, 64, 64),)))
    measured: list[str] = []

    def inside(call, made):
        measured.append(call[0].__name__)
        return 0

    peak_with_workspace(trace, inside)
    assert len(measured) < len([op for op in trace.ops if op.call]) / 4


def test_damaged_stores_are_measured_again(tmp_path) -> None:
    store = JsonCacheTable("operators", folder=tmp_path)
    store.put("key", 5)
    store.save()
    path = next((tmp_path / "plans").iterdir())
    path.write_text("{")
    assert JsonCacheTable("operators", folder=tmp_path).get("key") is None
    store.put("other", 6)
    store.save()
    assert JsonCacheTable("operators", folder=tmp_path).get("other") == 6
