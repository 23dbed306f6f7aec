"""Rules for a model on a GPU, run on the CPU."""

import random

import pytest
import torch
from torch import nn

from lowtide.attention import window_attention
from lowtide.memory.profiles import load_profile
from lowtide.memory.tracing.tracer import Tracer
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.capture.graph import Graph
from lowtide.streaming.engine.band_schedule import schedule_bands
from lowtide.streaming.engine.executor import BandExecutor, allocate_result, collect_rows
from lowtide.streaming.engine.halo_recompute import recomputed_results
from lowtide.streaming.engine.placement import page_factory
from lowtide.streaming.engine.program import lower_to_rows
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.pages.page import MemoryPage, concat_by_copy
from lowtide.streaming.planner.dry_run import dry_run
from lowtide.streaming.planner.layout_search import RESIDENT_SHARES, LayoutSearch
from lowtide.streaming.planner.segment_cost import estimate_segment
from lowtide.streaming.rules import fuse_mlp, fuse_qkv_proj
from support.random_models import BOUND, drawn_size, made
from support.stream_families import AUTOENCODERS, FAMILIES


@pytest.fixture(autouse=True)
def _as_on_a_card(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(Graph, "on_cpu", property(lambda _: False))
    for module in (fuse_mlp, fuse_qkv_proj):
        monkeypatch.setattr(module, "has_fp32_cpu_weights", lambda *_: False)
    monkeypatch.setattr(window_attention, "_is_on_cpu", lambda _: False)


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", [*FAMILIES, *AUTOENCODERS])
def test_bands_give_what_the_model_gives(name):
    module, channels = made(name)
    size = drawn_size(name, random.Random(name))
    image = torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = module(image.clone())
    program = lower_to_rows(capture(module, image))
    drafts = list(
        LayoutSearch(program).drafts((1 << 16, 1 << 20), ("memory", "disk"), RESIDENT_SHARES)
    )
    profile = load_profile("rtx3060-12gb")
    for layout in random.Random(name).sample(drafts, 2):
        predicted = dry_run(program, layout, whole_image=True, profile=profile)
        live = sum(row.value for row in predicted.rows if row.name == "live activations")
        assert predicted.peak_bytes >= live
        pages = page_factory(program, layout.placement, image.device, resident=layout.resident)
        sweep = BandExecutor(program, layout.segments, layout.bands, pages)
        tracer = Tracer()
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


def test_a_convolution_of_few_channels_to_many_is_light():
    class Net(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.chain = nn.Sequential(
                nn.Conv2d(channels, 16, 3, padding=1),
                nn.PReLU(16),
                nn.Conv2d(16, 16, 3, padding=1),
                nn.PReLU(16),
                nn.Conv2d(16, channels, 3, padding=1),
                nn.PixelShuffle(1),
            )

        def forward(self, x):
            return self.chain(x) + x  # whose rows are held together with the chain's

    for channels, light in ((1, True), (8, False)):
        program = lower_to_rows(capture(Net(channels).eval(), torch.rand(1, channels, 96, 20)))
        (part,) = cut_segments(program, ())
        convolutions = [
            index for index in part.steps if "conv" in str(program.graph.nodes[index].target)
        ]
        assert (convolutions[0] in recomputed_results(program, part, 2)) == light
        (first, *_) = schedule_bands(program, part, 2)
        assert bool(first.held.get(convolutions[0])) != light


@pytest.mark.parametrize("dim", [1, 2])
def test_copies_of_parts_give_what_cat_gives(dim):
    rows = torch.rand(2, 5, 8, 6)
    pieces = rows.narrow(dim, 0, 2), rows.narrow(dim, 1, 4)
    assert torch.equal(concat_by_copy(pieces, dim), torch.cat(pieces, dim))


@pytest.mark.parametrize("bands", [1, 2, 3, 5, 9, 24, 97])
def test_rows_that_light_convolutions_make_twice(bands):
    """Of a chain only some rows are held, and those between are made again."""
    model, image = light_chain(), torch.rand(1, 3, 291, 21)
    program = lower_to_rows(capture(model, image))
    (part,) = cut_segments(program, ())
    plan = list(schedule_bands(program, part, bands))
    sweep = BandExecutor(program, [part], (bands,), page_factory(program, "memory", image.device))
    shares = list[float]()
    with torch.inference_mode():
        (found,) = collect_rows(
            program, sweep.run([MemoryPage.from_tensor(image, 2)], (), shares.append)
        )
        assert (found - model(image)).abs().max() <= 1e-5
    # What is made again is no progress.
    assert sum(shares) == pytest.approx(1)
    twice = recomputed_results(program, part, bands)
    assert bool(twice) == (291 // bands >= 8)
    held = {index for band in plan for index in band.held}
    assert not held & twice
    if bands > 1:
        assert held
    for band in plan:
        assert all(0 < rows <= 16 for rows in band.recomputed_rows.values())
        assert set(band.recomputed_rows) <= twice


def test_recomputed_rows_cost_time():
    image = torch.rand(1, 3, 291, 21)
    program = lower_to_rows(capture(light_chain(4), image))
    (part,) = cut_segments(program, ())
    again = sum(
        rows * sum(map(program.row_bytes, (index, *program.steps[index].inputs)))
        for band in schedule_bands(program, part, 5)
        for index, rows in band.recomputed_rows.items()
        if program.steps[index].overlap
    )
    _, _, copied = estimate_segment(program, part, 5)
    # No map is put together; parts of the image, each taken once and a few rows twice, are taken
    # for copies.
    assert again > image.nbytes
    assert copied - again == pytest.approx(1.1 * image.nbytes, rel=0.15)


def test_nothing_is_made_twice_on_a_processor(monkeypatch):
    monkeypatch.setattr(Graph, "on_cpu", property(lambda _: True))
    program = lower_to_rows(capture(light_chain(), torch.rand(1, 3, 291, 21)))
    (part,) = cut_segments(program, ())
    assert not recomputed_results(program, part, 3)
    assert not any(band.recomputed_rows for band in schedule_bands(program, part, 3))
