"""Remembered operators give what PyTorch's own fake tensors would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.tracing import fake
from lowtide.memory.tracing.fake import CachedFakeCallsMode, FakeCallCache
from lowtide.memory.tracing.fake_fixes import fix_fake_result
from lowtide.memory.tracing.steps import InferenceStep, Step, TrainingStep


class Slow:
    """The reference: every operator worked out each time."""

    def __init__(self, mode: FakeTensorMode) -> None:
        pass

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fix_fake_result(func, args, func(*args, **kwargs))


class Odd(nn.Module):
    """What layouts depend on: transposed weights, parts, joined and repeated tensors, masks."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.mix = nn.Linear(6, 6)
        self.register_buffer("table", torch.arange(18).view(3, 6).float())

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        a, b = y.chunk(2, 1)
        y = torch.cat((b, a), 1).permute(0, 2, 3, 1)
        y = self.mix(y) * self.table.t()[:, :1].squeeze(1) + self.table.view(-1)[:6]
        y = y.masked_fill(y > 1, 0) + y.roll((1, 2), (1, 2)) * 2 + y.flip(1) / 3
        q = y.flatten(1, 2)
        y = (torch.softmax(q @ q.transpose(1, 2), -1) @ q).view_as(y)
        y = torch.stack([part + 1 for part in y.unbind(1)], 1)
        return F.pad(y.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last), (1, 2))


def traced(model: nn.Module, step: Step) -> tuple:
    trace = trace_step(model, step)
    # Autocast lets its copies of weights go in the order of their addresses.
    return sorted(trace.events), trace.ops, trace.initial, trace.kinds, trace.marks


@pytest.mark.grid(3)
@pytest.mark.parametrize("size", [(2, 7, 5), (1, 1, 9), (3, 4, 1)])
@pytest.mark.parametrize(
    "how",
    [{}, {"autocast": torch.bfloat16}, {"checkpointing": "full"}, {"optimizer": "adamw-foreach"}],
    ids=str,
)
def test_traces_are_the_same(size, how, monkeypatch) -> None:
    batch, height, width = size
    model = nn.Sequential(*(nn.Sequential(Odd(), nn.Conv2d(6, 3, 1)) for _ in range(4)))
    images = (torch.rand(batch, 3, height, width),)
    steps: list[Step] = [TrainingStep(images, **how)]
    if not how or "autocast" in how:
        steps.append(InferenceStep(images, **how))
    fast = [traced(model, step) for step in steps]
    monkeypatch.setattr(fake, "FakeCallCache", Slow)
    assert fast == [traced(model, step) for step in steps]


class WritesOut(nn.Module):
    """Writes results into tensors: of their shape, of a larger one, of another type, and empty."""

    def forward(self, x):
        torch.exp2(x, out=x)
        y = torch.div(x, x.sum(1, keepdim=True), out=torch.empty_like(x)[:])
        wide = torch.mul(y, 2, out=torch.empty_like(y, dtype=torch.float64))
        grown = torch.add(y[0], y, out=torch.empty(0))
        return wide + grown


def test_traces_of_written_results_are_the_same(monkeypatch) -> None:
    step = InferenceStep((torch.rand(2, 3, 5),))
    fast = traced(WritesOut(), step)
    monkeypatch.setattr(fake, "FakeCallCache", Slow)
    assert traced(WritesOut(), step) == fast


@pytest.fixture
def repeating():
    with FakeTensorMode() as mode, CachedFakeCallsMode(FakeCallCache(mode)):
        yield


@pytest.mark.usefixtures("repeating")
class TestRepeated:
    """Each call made twice: the second comes from memory."""

    def test_number_types_are_part_of_the_key(self) -> None:
        whole = torch.ones(3, 2, dtype=torch.int32)
        for _ in range(2):
            assert (whole + 1).dtype is torch.int32
            assert (whole + 1.0).dtype is torch.float32
            assert (whole + True).dtype is torch.int32

    def test_a_number_in_a_tensor_does_not_decide_the_type(self) -> None:
        half, scalar = torch.ones(3, dtype=torch.bfloat16), torch.tensor(2.0)
        for _ in range(2):
            assert (half * scalar).dtype is torch.bfloat16
            assert (half * scalar[None]).dtype is torch.float32

    def test_views_share_the_storage_of_this_call(self) -> None:
        for tensor in (torch.ones(4, 6), torch.ones(4, 6)):
            view = tensor.t()[1:]
            assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            assert (view.shape, view.stride(), view.storage_offset()) == ((5, 4), (1, 6), 1)
            assert tensor.contiguous() is tensor

    def test_a_named_gpu_need_not_be_present(self) -> None:
        made = torch.zeros(3, 2, device="cuda")
        for tensor in (torch.ones(3, 2), torch.ones(3, 2)):
            with torch.inference_mode():  # where composite operators come as they are
                moved = [tensor.to("cuda"), tensor.to("cuda", torch.float64), made.new_ones(3, 2)]
            assert {str((one + made).device) for one in (tensor, *moved)} == {"cpu"}
            assert moved[1].dtype is torch.float64

    def test_results_do_not_share(self) -> None:
        tensor = torch.ones(4, 6)
        storages = [(tensor * 2).untyped_storage(), (tensor * 2).untyped_storage()]
        assert len({storage._cdata for storage in storages}) == 2
        assert [storage.nbytes() for storage in storages] == [96, 96]

    def test_lists_stay_lists(self) -> None:
        for tensor in (torch.ones(4, 6), torch.ones(4, 6)):
            parts = torch.ops.aten.split.Tensor(tensor, 3, 1)
            assert isinstance(parts, list)
            assert [part.storage_offset() for part in parts] == [0, 3]

    def test_writes_happen(self) -> None:
        for tensor in (torch.ones(4, 6), torch.ones(4, 6)):
            assert tensor.mul_(2) is tensor
            tensor.resize_(2, 3)
            assert tensor.shape == (2, 3)
            out = torch.empty(0)
            assert torch.add(tensor, 1, out=out) is out
            assert out.shape == (2, 3)

    def test_gradients_flow(self) -> None:
        for weight in (torch.ones(4, 6, requires_grad=True), torch.ones(4, 6, requires_grad=True)):
            (weight.t() @ weight).relu().sum().backward()
            assert weight.grad is not None
            assert weight.grad.shape == (4, 6)

    def test_a_view_of_a_weight_in_inference_mode_is_no_inference_tensor(self) -> None:
        weight = torch.ones(4, 6)
        for _ in range(2):
            with torch.inference_mode():
                view, result = weight.t(), weight + 1
            assert not view.is_inference()
            assert result.is_inference()
