"""Pictures of a run: its points, or the highest of each bucket, in the file asked for."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_rgb
from torch import Tensor, nn

from lowtide import OutputError, UsageError
from lowtide.memory.prediction.estimate import Estimate, estimate
from lowtide.memory.tracing.steps import TrainingStep
from lowtide.memory.training import memory_plot
from lowtide.memory.training.memory_plot import memory_curve, plot_memory


class Net(nn.Module):
    """Enough operators for buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture(scope="module")
def estimated() -> Estimate:
    step = TrainingStep(
        (torch.empty(2, 8, 64, 64, device="meta"),),
        optimizer="adamw-foreach",
        accumulate=2,
        ema=True,
    )
    return estimate(Net(), step, device="rtx3060-12gb")


def test_every_point_is_there_if_they_fit(estimated: Estimate) -> None:
    assert estimated.trace is not None
    curve = memory_curve(estimated.trace)
    totals = [sum(kinds.values()) for _, kinds in curve]
    assert len(curve) == len(estimated.trace.events) + 1
    assert max(totals) == estimated.trace.peak_bytes
    assert totals[0] == estimated.trace.initial_bytes


@pytest.mark.parametrize("points", [1, 2, 7, 50, 4000])
def test_fewer_points_keep_the_peak(estimated: Estimate, points: int) -> None:
    assert estimated.trace is not None
    curve = memory_curve(estimated.trace, points)
    assert 0 < len(curve) <= points
    ops = [op for op, _ in curve]
    assert ops == sorted(ops)
    op, kinds = max(curve, key=lambda point: sum(point[1].values()))
    assert op == estimated.trace.peak_op()
    assert kinds == estimated.trace.live_at_peak()


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
def test_the_suffix_says_what_is_written(estimated: Estimate, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"memory{suffix}"
    plot_memory(estimated, path, budget_bytes=1 << 30, title="A net")
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if "svg" not in suffix else b"<?xml" in start


def words(path: Path) -> str:
    """The words of an SVG picture, which matplotlib also writes as comments."""
    return " ".join(
        line.strip()[5:-4] for line in path.read_text().splitlines() if line.strip()[:4] == "<!--"
    )


def test_areas_and_lines_have_names(estimated: Estimate, tmp_path: Path) -> None:
    plot_memory(estimated, tmp_path / "a.svg", budget_bytes=3 << 30, title="A net in training")
    text = words(tmp_path / "a.svg")
    for word in (
        "A net in training",
        "MiB",
        "operator",
        "weights",
        "optimizer state",
        "gradients",
        "inputs",
        "activations",
        "CUDA context",
        "reserved by the allocator",
        "budget 3.00 GiB",
        "expected peak",
        "upper bound",
        "peak of tensors",
        "forward",
        "backward",
    ):
        assert word in text, word


def test_the_cpu_has_no_context_and_reserves_nothing(tmp_path: Path) -> None:
    step = TrainingStep((torch.empty(1, 8, 16, 16, device="meta"),))
    plot_memory(estimate(Net(), step), tmp_path / "a.svg", budget_bytes=1 << 30, title="A net")
    text = words(tmp_path / "a.svg")
    assert "activations" in text
    for word in ("CUDA context", "reserved"):
        assert word not in text


def test_colors_differ_in_lightness_too() -> None:
    """Neighbors in the stack can be distinguished without hue."""
    light = [
        0.2126 * r + 0.7152 * g + 0.0722 * b
        for r, g, b in (to_rgb(color) for color in memory_plot._COLORS.values())
    ]
    assert len(set(memory_plot._COLORS.values())) == len(memory_plot._COLORS)
    assert all(abs(a - b) > 0.08 for a, b in itertools.pairwise(light))


def test_estimates_that_cannot_be_plotted(estimated: Estimate, tmp_path: Path, monkeypatch) -> None:
    plot = partial(plot_memory, budget_bytes=1 << 30, title="A net")
    with pytest.raises(UsageError, match=r"not written as \.unknown"):
        plot(estimated, tmp_path / "a.unknown")
    untraced = Estimate.model_validate(estimated.model_dump())
    with pytest.raises(UsageError, match="not traced"):
        plot(untraced, tmp_path / "a.png")
    with pytest.raises(OutputError, match="cannot be written"):
        plot(estimated, tmp_path / "missing" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="needs matplotlib") as error:
        plot(estimated, tmp_path / "a.png")
    assert error.value.hint.endswith("pip install '.[plot]'")
    assert not list(tmp_path.iterdir())
