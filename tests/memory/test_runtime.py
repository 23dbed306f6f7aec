"""Memory that a run leaves in addition to tensors, such as oneDNN's kernels."""

import pytest
import torch
import torch.nn.functional as F
from subprocess_run import measure_in_subprocess
from torch import nn

from lowtide.attention import cpu_ops
from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.prediction.operator_costs import multiply_adds
from lowtide.memory.prediction.result import (
    RuntimeObjectCounts,
    count_runtime_objects,
    shipped_runtime,
)
from lowtide.memory.tracing.steps import InferenceStep, TrainingStep

COUNTS = 24


class Layers(nn.Module):
    """Two linear layers of one size by oneDNN, of 60 and of 24 tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = cpu_ops.onednn_linear_any_layout(x, layer.weight, layer.bias)
        return cpu_ops.onednn_linear_any_layout(x[:, :12], self.first.weight, self.first.bias)


def objects_of(module, step):
    trace = trace_step(module, step)
    return count_runtime_objects(trace, len(trace.ops) - 1), trace


needs_onednn = pytest.mark.skipif(not cpu_ops.has_onednn, reason="no oneDNN here")


@needs_onednn
def test_a_linear_layer_by_onednn_counts_once_for_each_number_of_tokens():
    found, trace = objects_of(Layers(), InferenceStep((torch.empty(2, 30, 8, device="meta"),)))
    assert found.products == 2
    assert multiply_adds(trace) == (60 + 60 + 24) * 64


@needs_onednn
def test_a_linear_layer_with_gelu_has_a_kernel_of_its_own():
    class Both(Layers):
        def forward(self, x):
            weight = self.first.weight
            x = cpu_ops.onednn_linear_any_layout(x, weight, gelu=True)
            return cpu_ops.onednn_linear_any_layout(
                cpu_ops.onednn_linear_any_layout(x, weight), weight
            )

    found, _ = objects_of(Both(), InferenceStep((torch.empty(2, 30, 8, device="meta"),)))
    assert found.products == 2


def test_a_linear_layer_by_the_blas_library_does_not_count():
    found, _ = objects_of(nn.Linear(8, 8), InferenceStep((torch.empty(2, 30, 8, device="meta"),)))
    assert found == RuntimeObjectCounts(
        convolutions=0,
        backward_convolutions=0,
        low_convolutions=0,
        products=0,
        storages=found.storages,
    )


def test_backward_passes_of_convolutions_count_separately():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    images = torch.empty(1, 3, 16, 16, device="meta")
    step = TrainingStep((images,), loss=lambda result: result.mean())
    found, _ = objects_of(net, step)
    assert (found.convolutions, found.backward_convolutions) == (3, 3)
    found, _ = objects_of(net.bfloat16(), InferenceStep((images.bfloat16(),)))
    assert (found.low_convolutions, found.convolutions, found.backward_convolutions) == (3, 0, 0)


def run_many(by_onednn):
    """Linear layers of several numbers of tokens, once each."""
    torch.set_num_threads(1)
    weight, x = torch.randn(180, 180), torch.randn(4096, 180)
    layer = cpu_ops.onednn_linear_any_layout if by_onednn else F.linear
    with torch.inference_mode():
        for tokens in range(1, COUNTS + 1):
            layer(x[: 128 * tokens], weight)


@needs_onednn
@pytest.mark.skipif(torch.__version__ < "2.11", reason="2.8's oneDNN caches less than calibrated")
def test_onednn_caches_no_more_than_predicted():
    taken = {
        how: measure_in_subprocess("test_runtime:run_many", how).retained_bytes
        for how in (True, False)
    }
    predicted = COUNTS * shipped_runtime().product_bytes
    assert taken[True] - taken[False] < 1.5 * predicted  # without AVX-512 nearly nothing
