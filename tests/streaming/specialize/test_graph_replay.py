"""Runs by bands as CUDA graphs: all but the calls to a GPU."""

import gc
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.core.errors import BudgetError, ModelError, UsageError
from lowtide.core.units import MIB
from lowtide.streaming import prepared_stream
from lowtide.streaming.specialize import graph_replay
from lowtide.streaming.specialize.graph_replay import GraphReplays
from support.stream_models import Normed, Windows, whole


@pytest.fixture(autouse=True)
def _results_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    with torch.no_grad():
        yield


class Again:
    """A recorder for the CPU: what is recorded is run again, into the same memory."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, run):
        self.recorded += 1
        made = run()

        def replay():
            self.replayed += 1
            with torch.inference_mode():  # what is made in it may not be written to outside
                for one, new in zip(made, run(), strict=True):
                    one.copy_(new)

        return made, replay


@pytest.fixture()
def again(monkeypatch):
    """A recording device in place of a GPU."""
    recorder = Again()
    monkeypatch.setattr(graph_replay, "graph_recorder_for", lambda device: recorder)
    monkeypatch.setattr(prepared_stream, "require_cuda_graphs", lambda device, hint: None)
    return recorder


def test_a_run_is_recorded_with_the_second_image_and_replayed_from_the_third(again):
    model = Normed().eval()
    small = lowtide.stream(model, budget="256MiB", recorded=True)
    counts = []
    for number in range(4):
        image = torch.rand(1, 3, 75, 53, generator=torch.Generator().manual_seed(number))
        kept = image.clone()
        assert (small(image) - whole(model, image)).abs().max() <= 5e-6
        assert torch.equal(image, kept)
        counts.append((again.recorded, again.replayed))
    # The second is compared with a replay.
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert "recorded as a CUDA graph at the second image" in small.explain(torch.rand(1, 3, 75, 53))


def test_results_have_memory_of_their_own_and_a_batch_is_replayed_image_by_image(again):
    model = Normed().eval()
    small = lowtide.stream(model, budget="256MiB", recorded=True)
    images = torch.rand(5, 3, 40, 30)
    assert (small(images) - whole(model, images)).abs().max() <= 5e-6
    assert again.recorded == 1
    first = small(images[:1])
    kept = first.clone()
    with torch.inference_mode():
        small(images[1:2])
    assert torch.equal(first, kept)


def sines(image):
    return [image.sin()]


def test_another_size_or_other_rounding_is_recorded_anew_and_the_former_goes(again):
    calls = GraphReplays()
    for image in (torch.rand(1, 3, 8, 9), torch.rand(1, 3, 9, 8)):
        for _ in range(3):
            assert torch.equal(calls(sines, [image])[0], image.sin())
    assert again.recorded == 2
    former = weakref.ref(calls._recording)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = not before
        calls(sines, [image])
        gc.collect()
        assert former() is None
        calls(sines, [image])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert again.recorded == 3


def test_a_recording_that_differs_or_fails_is_refused(monkeypatch):
    image = torch.rand(1, 3, 100, 9)

    def forgets(run):
        return [torch.zeros_like(one) for one in run()], lambda: None

    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    for recorder, said in ((forgets, "differs by"), (fails, r"cannot be recorded.*capturing$")):
        monkeypatch.setattr(graph_replay, "graph_recorder_for", lambda device, of=recorder: of)
        calls = GraphReplays()
        calls(sines, [image])
        with pytest.raises(ModelError, match=said) as caught:
            calls(sines, [image])
        assert caught.value.hint == "leave out recorded=True"


def test_windows_that_are_masked_differently_are_replayed(again):
    model = Windows().eval()
    small = lowtide.stream(model, budget="256MiB", recorded=True)
    for number in range(3):
        image = torch.rand(1, 3, 256, 192, generator=torch.Generator().manual_seed(number))
        assert (small(image) - whole(model, image)).abs().max() <= 5e-6
    assert again.replayed == 2


class Forecast(nn.Module):
    """A series with a step (B,), its mean and the steps after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(3, 2, 9, padding=4)

    def forward(self, series, step):
        return series.mean((1, 2)), self.conv(series) * step.sin()


def test_several_inputs_and_results_are_replayed(again):
    model = Forecast().eval()
    small = lowtide.stream(model, budget="256MiB", recorded=True, axis=2)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        given = torch.rand(1, 3, 20011, generator=generator), torch.tensor([number + 1.0])
        for found, expected in zip(
            small(*given), whole(lambda pair: model(*pair), given), strict=True
        ):
            assert (found - expected).abs().max() <= 5e-6
    assert again.replayed == 2


def test_a_device_without_graphs_and_pages_elsewhere_are_refused():
    model = Normed().eval()
    small = lowtide.stream(model, budget="256MiB", recorded=True)
    with pytest.raises(UsageError, match="cpu has no CUDA graphs") as caught:
        small(torch.rand(1, 3, 16, 16))
    assert caught.value.hint == "leave out recorded=True"
    with pytest.raises(UsageError, match="cannot keep its pages on disk"):
        lowtide.stream(model, pages="disk", recorded=True)


@pytest.mark.slow
def test_the_budget_includes_what_a_recording_holds_in_addition_to_the_run(again):
    model, image = Normed(channels=8).eval(), torch.rand(1, 3, 512, 512)
    copies = image.nbytes + whole(model, image).nbytes
    needed = []
    for recorded in (False, True):
        small = lowtide.stream(model, budget="17MiB", pages="memory", recorded=recorded)
        with pytest.raises(BudgetError) as caught:
            small(image)
        needed.append(caught.value.smallest)
        enough = lowtide.stream(
            model, budget=-(-needed[-1] // MIB) * MIB, pages="memory", recorded=recorded
        )
        assert (enough(image) - whole(model, image)).abs().max() <= 5e-6
    # No page goes elsewhere, although nothing was said of that.
    with pytest.raises(BudgetError) as caught:
        lowtide.stream(model, budget="17MiB", recorded=True)(image)
    assert caught.value.smallest == needed[1]
    # Each keeps a share of the rest for additional memory.
    rows = min(0.9 * needed[0], needed[0] - 16 * MIB)
    assert needed[1] == pytest.approx((rows + copies + 64 * MIB) / 0.9, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("make, shape", [(Normed, (2, 3, 261, 190)), (Windows, (1, 3, 256, 192))])
def test_a_gpu_replays_what_it_computes(make, shape, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = make().eval().cuda()
    plain = lowtide.stream(model, budget="1GiB")
    small = lowtide.stream(model, budget="1GiB", recorded=True)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        image = torch.rand(*shape, generator=generator).cuda()
        assert (small(image) - plain(image)).abs().max() <= 1e-6
        assert (small(image) - whole(model, image)).abs().max() <= 2e-5
