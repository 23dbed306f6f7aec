"""Recorded histories of the allocator, replayed: by hand here, real ones where there is a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from lowtide.core.units import GIB, MIB
from lowtide.memory.allocator import SimulatedAllocator, SimulatedOutOfMemory
from support.recorded_history import replay_snapshot


def entry(action, addr=0, size=0, stream=0, **more):
    return dict(action=action, addr=addr, size=size, stream=stream, frames=[], **more)


def freed(addr, size, stream=0):
    return [entry(action, addr, size, stream) for action in ("free_requested", "free_completed")]


RECORDED = [
    entry("segment_alloc", 1000, 20 * MIB),
    entry("alloc", 1000, 3 * MIB),
    entry("alloc", 4000, 4 * MIB),
    *freed(1000, 3 * MIB),
    entry("segment_alloc", 9000, 2 * MIB, stream=7),
    entry("alloc", 9000, 100, stream=7),
    entry("snapshot"),
    entry("segment_alloc", 20000, 64 * MIB),
    entry("alloc", 20000, 64 * MIB),
    *freed(20000, 64 * MIB),
    entry("segment_free", 20000, 64 * MIB),
    entry("segment_alloc", 30000, 72 * MIB),
    entry("alloc", 30000, 71 * MIB),
]


def test_replaying_a_recorded_history():
    result = replay_snapshot(RECORDED)
    assert result.recorded_reserved == result.predicted_reserved == (20 + 2 + 72) * MIB
    assert (result.allocations, result.unmatched, result.error) == (5, 0, 0)


def test_a_history_with_another_device_in_mind():
    """With a capacity the simulation decides by itself what goes back, and when."""
    roomy = replay_snapshot(RECORDED, SimulatedAllocator(GIB))
    assert roomy.predicted_reserved == (20 + 2 + 64 + 72) * MIB
    assert roomy.error == pytest.approx(158 / 94 - 1)
    tight = replay_snapshot(RECORDED, SimulatedAllocator(100 * MIB))
    assert tight.predicted_reserved == 94 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        replay_snapshot(RECORDED, SimulatedAllocator(80 * MIB))


def test_blocks_from_before_the_recording_are_counted():
    result = replay_snapshot([*freed(5, 512), *RECORDED])
    assert result.unmatched == 1


RECORD = """
import json, sys, torch
from torch import nn
from support.recorded_history import replay_snapshot

torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=1_000_000)
width, body = 64, []
for _ in range(6):
    body += [nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)]
net = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *body, nn.Conv2d(width, 48, 3, padding=1))
net = net.cuda()
with torch.inference_mode():
    for side in [*range(128, 513, 64), *range(512, 127, -64)] * 2:
        nn.functional.pixel_shuffle(net(torch.rand(1, 3, side, side, device="cuda")), 4).cpu()
torch.cuda.empty_cache()
optimizer = torch.optim.AdamW(net.parameters())
for batch in (2, 1, 3, 3):
    net(torch.rand(batch, 3, 96, 96, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
trace = torch.cuda.memory._snapshot()["device_traces"][0]
result = replay_snapshot(trace)
print(json.dumps({**vars(result), "measured": torch.cuda.max_memory_reserved()}))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_predicts_what_a_real_allocator_reserves(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    done = subprocess.run(
        [sys.executable, "-c", RECORD], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["unmatched"] == 0
    assert result["allocations"] > 500
    assert result["recorded_reserved"] == result["measured"]
    assert abs(result["predicted_reserved"] / result["measured"] - 1) <= 0.03
