"""Types under autocast are those of CUDA, as PyTorch itself gives them to fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.memory.prediction.estimate import trace_step, traced_estimate
from lowtide.memory.profiles import load_profile
from lowtide.memory.profiles.simulated_device import simulate_autocast
from lowtide.memory.tracing.steps import TrainingStep
from lowtide.memory.tracing.trace import MemoryTracer

GPU, CPU = load_profile("rtx3060-12gb"), load_profile("cpu")

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_norm": lambda x, w: F.group_norm(x, 2, w, w),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w, w),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w),
    "batch_norm": lambda x, w: F.batch_norm(x, w, w, w, w, training=True),
    "instance_norm": lambda x, w: F.instance_norm(x),
    "normalize": lambda x, w: F.normalize(x),
    "norm": lambda x, w: x.norm(),
    "softmax": lambda x, w: x.softmax(-1),
    "F.softmax": lambda x, w: F.softmax(x, -1),
    "log_softmax": lambda x, w: torch.log_softmax(x, 1),
    "silu": lambda x, w: F.silu(x),
    "gelu": lambda x, w: F.gelu(x),
    "softplus": lambda x, w: F.softplus(x),
    "exp": lambda x, w: x.exp(),
    "torch.log": lambda x, w: torch.log(x),
    "square": lambda x, w: x.square(),
    "**": lambda x, w: x**2,
    "2**": lambda x, w: 2**x,
    "1/": lambda x, w: 1 / x,
    "+": lambda x, w: x + x,
    "rsqrt": lambda x, w: torch.rsqrt(x),
    "sum": lambda x, w: x.sum((2, 3)),
    "sum of a type": lambda x, w: torch.sum(x, dtype=torch.float64),
    "softmax of a type": lambda x, w: torch.softmax(x, -1, torch.bfloat16),
    "prod": lambda x, w: x.prod(),
    "cumsum": lambda x, w: torch.cumsum(x, 1),
    "mean": lambda x, w: x.mean((2, 3)),
    "std": lambda x, w: x.std(),
    "nearest": lambda x, w: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x, w: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "nn.Upsample": lambda x, w: nn.Upsample(scale_factor=2)(x),
    "reflect": lambda x, w: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "zero pad": lambda x, w: F.pad(x, (1, 1)),
    "replicate": lambda x, w: nn.ReplicationPad2d(1)(x),
    "avg_pool2d": lambda x, w: F.avg_pool2d(x, 2),
    "conv2d": lambda x, w: F.conv2d(x, w.expand(8, 8).reshape(8, 8, 1, 1)),
    "linear": lambda x, w: F.linear(x, w.expand(4, 8)),
    "einsum": lambda x, w: torch.einsum("bchw,bdhw->bcd", x, x),
    "@": lambda x, w: x @ x.mT,
    "cat": lambda x, w: torch.cat([x, x], 1),
    "cat of two types": lambda x, w: torch.cat([x, x.float()], 1),
    "mse_loss": lambda x, w: F.mse_loss(x, x),
    "huber_loss": lambda x, w: F.huber_loss(x, x),
    "cross_entropy": lambda x, w: F.cross_entropy(x, torch.zeros_like(x)),
    "pixel_shuffle": lambda x, w: F.pixel_shuffle(x, 2),
}


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """CUDA's autocast without a CUDA device, which torch.autocast would refuse to switch on."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.grid(7)
# PyTorch 2.11 warns that RMS norm's fp32 weights keep it from a fused kernel.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_the_types_are_those_of_cuda(name: str, given: torch.dtype) -> None:
    asks_driver = name in ("batch_norm", "conv2d") and torch.__version__ < "2.11"
    if asks_driver and not torch.cuda.is_available():
        pytest.skip("PyTorch 2.8's fake one of CUDA asks the driver")
    found = []
    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            x = torch.empty(2, 8, 8, 8, device=device, dtype=given)
            weight = torch.empty(8, device=device)
            if device == "cuda":
                with cuda_autocast(torch.bfloat16):
                    found.append(CALLS[name](x, weight).dtype)
            else:
                with simulate_autocast(GPU), torch.autocast("cpu", torch.bfloat16):
                    found.append(CALLS[name](x, weight).dtype)
    assert found[1] == found[0]


@pytest.mark.parametrize("call", ["group_norm", "softmax", "nearest", "reflect"])
def test_the_cpu_and_no_autocast_stay_as_they_are(call: str) -> None:
    with FakeTensorMode():
        x, weight = torch.empty(2, 8, 8, 8, dtype=torch.bfloat16), torch.empty(8)
        with torch.autocast("cpu", torch.bfloat16):
            plain = CALLS[call](x, weight).dtype
            with simulate_autocast(CPU):
                assert CALLS[call](x, weight).dtype == plain
        with simulate_autocast(GPU):
            assert CALLS[call](x, weight.bfloat16()).dtype == torch.bfloat16


def test_a_sum_takes_no_copy_of_what_it_reads() -> None:
    tracer = MemoryTracer()
    with FakeTensorMode():
        x = torch.empty(2, 8, 64, 64, dtype=torch.bfloat16)
        tracer.label([x], "inputs")
        with tracer, simulate_autocast(GPU), torch.autocast("cpu", torch.bfloat16):
            x.sum((2, 3))
    assert tracer.trace.peak_bytes == 2 * 8 * 64 * 64 * 2 + 2 * 8 * 4


class Norms(nn.Module):
    """Blocks whose normalizations are what autocast keeps in fp32."""

    def __init__(self) -> None:
        super().__init__()
        # A convolution's results are of the low precision, as in most networks.
        self.first = nn.Conv2d(16, 16, 1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
                for _ in range(4)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(("how", "more"), [("none", 16), ("selective", 7), ("full", 7)])
def test_a_step_keeps_what_cuda_would(how: Any, more: int) -> None:
    step = TrainingStep(
        (torch.empty(2, 16, 32, 32, device="meta"),),
        autocast=torch.bfloat16,
        checkpointing=how,
        loss=lambda result: result[:1, :1, :1, :1].float().sum(),
    )
    plain = trace_step(Norms(), step).peak_bytes
    once = trace_step(Norms(), step, profile=GPU).peak_bytes
    with simulate_autocast(GPU):
        twice = trace_step(Norms(), step, profile=GPU).peak_bytes
    # Twins in fp32 where bf16 would do, more bytes for each element, in every block that is held.
    assert once - plain >= more * 2 * 16 * 32 * 32
    assert twice == once
    assert traced_estimate(Norms(), step, GPU).live_bytes == once
