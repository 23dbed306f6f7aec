"""Streamed weights on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from lowtide.core.units import MIB
from lowtide.memory.offload.offload_plan import plan_offload
from lowtide.memory.offload.stream import stream_from_file, stream_weights
from lowtide.memory.pinned import PinnedMemory
from support.offloaded_models import ZOO, Convolutions, build, inputs, state_of
from support.offloaded_weights import plan_all, same


def on_gpu(test):
    """Needs a CUDA device, and is skipped where there is none."""
    absent = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(absent, reason="no CUDA device here")(test))


@on_gpu
# cuDNN wants the weights of a recurrent layer in one piece, and copies those of a buffer there.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("source", ["disk", "host"])
@pytest.mark.parametrize("kind", ZOO)
def test_cuda_gives_the_bytes_of_the_resident_model(kind, source):
    resident = build(kind).cuda()
    with torch.inference_mode():
        expected = resident(inputs().cuda()).cpu()
    model = build(kind)
    before = state_of(model)
    with stream_weights(model, plan_all(model), source=source, device="cuda"):
        with torch.inference_mode():
            results = [model(inputs().cuda()) for _ in range(20)]
        assert all(same(result.cpu(), expected) for result in results)
    assert state_of(model) == before
    assert not any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))


def chain(width, count):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


@on_gpu
@pytest.mark.parametrize("source", ["disk", "host"])
def test_copies_never_overtake_the_kernels_that_use_them(source, tmp_path):
    """Kernels that take longer than a copy: a buffer overwritten early changes the result."""
    model, path = chain(1024, 12), tmp_path / "weights.safetensors"
    torch.manual_seed(3)
    weights = {f"{i}.weight": torch.randn(1024, 1024) / 32 for i in range(12)}
    save_file(weights, path)
    x = torch.randn(32768, 1024, device="cuda")
    with torch.inference_mode():
        expected = x
        for weight in weights.values():
            expected = F.linear(expected, weight.cuda())
        with stream_from_file(model, path, plan_all(model), source=source, device="cuda"):
            for _ in range(10):
                assert torch.equal(model(x), expected)


@on_gpu
@pytest.mark.parametrize("source", ["disk", "host"])
def test_device_memory_is_that_of_the_plan(source, tmp_path):
    model, path = chain(4096, 8), tmp_path / "weights.safetensors"
    save_file({f"{i}.weight": torch.zeros(4096, 4096) for i in range(8)}, path)
    plan = plan_offload(model, 256 * MIB, activation_bytes=16 * MIB)
    x = torch.zeros(1, 4096, device="cuda")
    with torch.inference_mode():
        F.linear(x, torch.zeros(4096, 4096, device="cuda"))  # the library's own workspace
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with stream_from_file(model, path, plan, source=source, device="cuda"), torch.inference_mode():
        model(x)
    assert torch.cuda.max_memory_allocated() - base <= plan.peak_bytes
    assert plan.streamed_bytes > 256 * MIB


@on_gpu
def test_buffers_changed_on_the_device_are_copied_back():
    model, plain = build(Convolutions).train(), build(Convolutions).train().cuda()
    with torch.inference_mode():
        plain(inputs().cuda())
        with stream_weights(model, plan_all(model, resident=["1"]), device="cuda"):
            assert model[1].running_mean.is_cuda
            model(inputs().cuda())
    assert state_of(model) == state_of(plain.cpu())


@on_gpu
def test_pinned_memory_is_exact_and_limited():
    pinned = PinnedMemory()
    memory = pinned.empty(5 * MIB + 1)
    assert memory.is_pinned()
    assert pinned.pinned_bytes == 5 * MIB + 1
    pinned.limit_bytes = 6 * MIB
    assert not pinned.empty(2 * MIB).is_pinned()
    pinned.close()
    assert not memory.is_pinned()
