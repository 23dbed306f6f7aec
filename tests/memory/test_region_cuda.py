"""A region's rows on a GPU, simulated and real."""

import pytest
import torch

from lowtide.core.units import MIB
from lowtide.memory.region import measure
from support.region_blocks import values


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
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
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
    assert (outer.peak_bytes, outer.retained_bytes) == (300 * MIB, 20 * MIB)
    assert values(outer.ledger) == {
        "allocated before": 100 * MIB,
        "live activations and workspace": 300 * MIB,
        "allocator": 900 * MIB,
        "context": 300 * MIB,
    }
    # The inner region starts with 400 MiB, which go before they are exceeded.
    assert (inner.peak_bytes, inner.retained_bytes) == (0, 0)
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
        assert region.retained_bytes == second.nbytes
        assert rows["allocated before"] == before.nbytes + empty
        assert rows["live activations and workspace"] == region.peak_bytes
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
