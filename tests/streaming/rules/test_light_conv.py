"""Light convolutions in bands, as on a GPU."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.capture.graph import Graph
from lowtide.streaming.engine.cut_points import CutPoints
from lowtide.streaming.engine.executor import BandExecutor, collect_rows
from lowtide.streaming.engine.placement import memory_page_factory
from lowtide.streaming.engine.program import lower_to_rows
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.pages.page import MemoryPage


@pytest.fixture(autouse=True)
def _as_on_a_card(monkeypatch):
    monkeypatch.setattr(Graph, "on_cpu", property(lambda _: False))


def light(kernel=3, *, dilation=1, padding="same", channels=16, layers=4, **options):
    """Convolutions with learned slopes between them."""
    torch.manual_seed(0)
    found = [nn.Conv2d(3, channels, kernel, padding=padding, dilation=dilation, **options)]
    for _ in range(layers):
        found += [
            nn.PReLU(channels, init=0.2),
            nn.Conv2d(channels, channels, kernel, padding=padding, dilation=dilation, **options),
        ]
    found += [nn.PReLU(channels), nn.Conv2d(channels, 12, 3, padding=1), nn.PixelShuffle(2)]
    return nn.Sequential(*found).eval()


class Copied(TorchDispatchMode):
    """Bytes that `cat` makes, and how many convolutions are run."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        if func is torch.ops.aten.cat.default:
            self.bytes += found.nbytes
        return found


def run_in(bands, model, image, program=None):
    program = program or lower_to_rows(capture(model, image))
    segments = cut_segments(program, CutPoints(program).cuts(1))
    assert len(segments) == 1
    sweep = BandExecutor(program, segments, [bands], memory_page_factory(program, image.device))
    copied = Copied()
    with copied:
        (found,) = collect_rows(program, sweep.run([MemoryPage.from_tensor(image, 2)]))
    with torch.inference_mode():
        whole = model(image)
    return (found - whole).abs().max().item(), copied


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel": 5},
        {"dilation": 2},
        {"kernel": 1},
        {"kernel": (3, 5)},
        {"bias": False},
        {"padding": (1, 0)},
        {"padding": (1, 1), "padding_mode": "zeros"},
    ],
    ids=str,
)
def test_bands_of_any_height_give_what_the_model_gives(options):
    image = torch.rand(1, 3, 83, 21, generator=torch.Generator().manual_seed(1))
    model = light(**options)
    program = lower_to_rows(capture(model, image))
    for bands in (1, 2, 3, 7, 11, 40):
        assert run_in(bands, model, image, program)[0] <= 2e-6


def test_low_bands_are_put_together():
    image = torch.rand(1, 3, 128, 32)
    _, copied = run_in(42, light(layers=1), image)
    assert copied.bytes > 0
    assert copied.calls["aten.conv2d.default"] <= 3 * 42
