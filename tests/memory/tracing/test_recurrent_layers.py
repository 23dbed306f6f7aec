"""Recurrent layers: their workspace counts, and what would end the process does not."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.jobs.train.plan import plan_training
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.prediction.cpu import CpuWorkspaceMeter, peak_with_workspace
from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.tracing.fake import model_tensors
from lowtide.memory.tracing.steps import (
    InferenceStep,
    NullStepObserver,
    TrainingStep,
    input_tensors,
)
from support.stored_tables import empty_table


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][-1]


LAYERS = {
    "one layer": (lambda: nn.LSTM(8, 16), (10, 2, 8)),
    "two layers, both ways": (
        lambda: nn.LSTM(16, 48, num_layers=2, bidirectional=True),
        (70, 5, 16),
    ),
    "many steps": (lambda: nn.LSTM(16, 64), (2500, 2, 16)),  # more than are tried
    "gru": (lambda: nn.GRU(8, 16), (10, 2, 8)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_peak_is_what_the_profiler_sees(layer, training) -> None:
    make, shape = LAYERS[layer]
    model, inputs = Last(make()), (torch.rand(shape),)
    step = TrainingStep(inputs, optimizer="sgd") if training else InferenceStep(inputs)
    scratch = CpuWorkspaceMeter(empty_table())
    predicted = peak_with_workspace(trace_step(model, step), scratch.operator_peak)
    run = step.prepare(model)
    run(NullStepObserver())
    held = sum(tensor.nbytes for tensor in [*model_tensors(model), *input_tensors(step)])
    seen = live_peak_bytes(lambda: run(NullStepObserver())) + held
    assert predicted.total == pytest.approx(seen, rel=0.01)
    assert not scratch.assumed


def test_a_training_of_an_lstm_is_estimated_and_planned() -> None:
    step = TrainingStep((torch.empty(10, 2, 8),), optimizer="adamw")
    found = lowtide.estimate(Last(nn.LSTM(8, 16)), step)
    assert found.method == "traced"
    assert 0 < found.live_bytes < found.predicted_bytes <= found.upper_bytes
    plan = plan_training(
        Last(nn.LSTM(8, 16)), device="cpu", budget="1GiB", inputs=("10,8",), batch=2
    )
    assert plan.fits


class Unchecked(nn.Module):
    """A backward pass with an empty workspace, beyond whose end it would read."""

    def forward(self, x):
        shapes = (64, 8), (64, 16), (64,), (64,), (2, 16), (2, 16)
        weights = [x.new_zeros(shape) for shape in shapes]
        made = x.new_zeros(10, 2, 16)
        return torch.ops.aten.mkldnn_rnn_layer_backward(
            x,
            *weights,
            made,
            *weights[4:],
            made,
            None,
            None,
            False,
            2,
            16,
            1,
            True,
            True,
            False,
            (),
            False,
            torch.zeros(0, dtype=torch.uint8),
        )[0]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_an_operator_that_would_end_the_process_is_taken_at_its_bound() -> None:
    found = lowtide.estimate(Unchecked(), InferenceStep((torch.empty(10, 2, 8),)))
    (row,) = (row for row in found.ledger if row.name == "workspace")
    assert row.origin == "prior"
    assert row.value >= 3 * (10 * 2 * 8) * 4
    assert any("not safe" in note and "mkldnn_rnn_layer_backward" in note for note in found.notes)
