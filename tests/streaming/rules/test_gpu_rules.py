"""Rules for a model on a GPU, run on the CPU."""

import random

import pytest
import torch
from torch import nn

from lowtide.attention import window_attention
from lowtide.memory.profiles import load_profile
from lowtide.memory.tracing.trace import MemoryTracer
from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.capture.graph import OperatorGraph
from lowtide.streaming.engine.executor import BandExecutor, allocate_result, collect_rows
from lowtide.streaming.engine.placement import page_factory
from lowtide.streaming.engine.program import lower_to_rows
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.pages.page import MemoryPage, concat_by_copy
from lowtide.streaming.planner.dry_run import dry_run, trace_stream_run
from lowtide.streaming.planner.layout_search import RESIDENT_SHARES, draft_layouts
from support.random_models import BOUND, drawn_size, made
from support.stream_families import AUTOENCODERS, FAMILIES


@pytest.fixture(autouse=True)
def _as_on_a_card(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(OperatorGraph, "on_cpu", property(lambda _: False))
    monkeypatch.setattr(window_attention, "_is_on_cpu", lambda _: False)


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", [*FAMILIES, *AUTOENCODERS])
def test_bands_give_what_the_model_gives(name):
    module, channels = made(name)
    size = drawn_size(name, random.Random(name))
    image = torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = module(image.clone())
    program = lower_to_rows(capture_graph(module, image))
    drafts = list(draft_layouts(program, (1 << 16, 1 << 20), ("memory", "disk"), RESIDENT_SHARES))
    profile = load_profile("rtx3060-12gb")
    for layout in random.Random(name).sample(drafts, 2):
        predicted = dry_run(program, layout, whole_image=True, profile=profile)
        live = sum(row.value for row in predicted.rows if row.name == "live activations")
        assert predicted.peak_bytes >= live
        pages = page_factory(program, layout.placement, image.device, resident=layout.resident)
        sweep = BandExecutor(program, layout.segments, layout.bands, pages)
        tracer = MemoryTracer()
        tracer.label(program.graph.tensors.values(), "weights")
        tracer.label([image], "inputs")
        with tracer:
            result = allocate_result(program, image.device)
            (found,) = collect_rows(program, sweep.run([MemoryPage.from_tensor(image, 2)]), result)
        assert (found - whole).abs().max() <= BOUND * whole.abs().max()
        # What is told of a run is what lives in it, but for masks that are looked at once: one is
        # as large as the image here.
        seen = tracer.trace.peak_bytes - sum(tracer.trace.initial.values())
        assert seen == pytest.approx(live, rel=0.02, abs=image.nbytes)


def light_chain(depth=12):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(8)]
    for _ in range(depth):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.PReLU(8)]
    return nn.Sequential(*layers, nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2)).eval()


@pytest.mark.parametrize("dim", [1, 2])
def test_copies_of_parts_give_what_cat_gives(dim):
    rows = torch.rand(2, 5, 8, 6)
    pieces = rows.narrow(dim, 0, 2), rows.narrow(dim, 1, 4)
    assert torch.equal(concat_by_copy(pieces, dim), torch.cat(pieces, dim))


@pytest.mark.parametrize("bands", [1, 2, 3, 5, 9, 24, 97])
def test_bands_of_light_convolutions(bands):
    model, image = light_chain(), torch.rand(1, 3, 291, 21)
    program = lower_to_rows(capture_graph(model, image))
    (part,) = cut_segments(program, ())
    sweep = BandExecutor(program, [part], (bands,), page_factory(program, "memory", image.device))
    shares = list[float]()
    with torch.inference_mode():
        (found,) = collect_rows(
            program, sweep.run([MemoryPage.from_tensor(image, 2)], (), shares.append)
        )
        assert (found - model(image)).abs().max() <= 1e-5
    assert sum(shares) == pytest.approx(1)


def test_the_result_is_taken_before_all_bands():
    model, image = nn.Conv2d(3, 5, 3, padding=1).eval(), torch.rand(1, 3, 64, 48)
    program = lower_to_rows(capture_graph(model, image))
    layout = next(draft_layouts(program, (1 << 20,), ("memory",)))
    trace = trace_stream_run(program, layout, whole_image=True)
    assert trace.events[0].size == 5 * 64 * 48 * 4
    # The image is the caller's.
    assert not any(event.storage in trace.initial for event in trace.events)
