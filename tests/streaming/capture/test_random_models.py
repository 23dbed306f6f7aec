"""Drawn at random: neither bands, cuts, pages, work done again, nor the budget show in a result."""

import random

import pytest
import torch

from lowtide import BudgetError
from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.engine.executor import BandExecutor
from lowtide.streaming.engine.placement import page_factory
from lowtide.streaming.engine.program import lower_to_rows
from lowtide.streaming.engine.segments import CutFinder, cut_segments
from lowtide.streaming.pages.page import MemoryPage
from lowtide.streaming.planner.stream_planner import StreamPlanner
from lowtide.streaming.rules.norm import GroupMoments
from lowtide.streaming.rules.rule import Reduction
from support.random_models import BOUND, drawn_size, made
from support.stream_families import AUTOENCODERS, FAMILIES

CPU = torch.device("cpu")


def drawn_layout(module, image, program, draw):
    """(segments, bands of each, where pages lie, those in memory in any case)"""
    pages = draw.choice(("memory", "disk"))
    if draw.random() < 0.1:
        limit = int(2 ** draw.uniform(16, 23))
        planner = StreamPlanner(module, image, pages=pages)
        try:
            layout = planner.choose(limit)
        except BudgetError as error:
            layout = planner.choose(error.smallest)
        return layout.segments, layout.bands, pages, layout.resident
    segments = cut_segments(program, CutFinder(program).cuts(draw.randint(1, 12)))
    held = {index for part in segments for index in part.pages if draw.random() < 0.3}
    return segments, [draw.randint(1, 12) for _ in segments], pages, held


def check_draws(name, number, size, layouts):
    draw = random.Random(f"{name} {number}")
    module, channels = made(name)
    image = torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        whole = module(image.clone())
    program = lower_to_rows(capture_graph(module, image))
    for _ in range(layouts):
        segments, bands, pages, held = drawn_layout(module, image, program, draw)
        sweep = BandExecutor(
            program, segments, bands, page_factory(program, pages, CPU, resident=held)
        )
        found = torch.cat([rows for _, _, rows in sweep.run([MemoryPage.from_tensor(image, 2)])], 2)
        error = (found - whole).abs().max() / whole.abs().max()
        assert error <= BOUND, (name, size, bands, pages, error)


@pytest.mark.parametrize("name", ["RCAN", "HAT", "decoder", "U-Net"])
def test_a_few_draws(name):
    check_draws(name, 0, drawn_size(name, random.Random(name)), 2)


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", ["SwinIR", "HAT", "decoder"])
def test_the_least_budget_that_an_error_names_is_enough(name):
    """Of few pixels too, of which operators take less for themselves than of many."""
    module, channels = made(name)
    image = torch.randn(1, channels, 24, 20)
    with pytest.raises(BudgetError) as error:
        StreamPlanner(module, image).choose(1024)
    least = error.value.smallest
    assert StreamPlanner(module, image).choose(least).peak_bytes <= least


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *AUTOENCODERS])
def test_a_thousand_draws(name):
    draw = random.Random(name)
    for number in range(1, 9):
        check_draws(name, number, drawn_size(name, draw), 10)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("bands", [1, 3, 17])
def test_statistics_of_bands_are_those_of_one_pass_in_double_precision(offset, bands):
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 8, 170, 61, generator=generator) * torch.linspace(0.1, 9, 170)[:, None]
    image += offset
    program = lower_to_rows(capture_graph(torch.nn.GroupNorm(4, 8).eval(), image))
    step = next(one for one in program.steps.values() if isinstance(one, Reduction))
    state = None
    for part in image.tensor_split(bands, 2):
        state = step.add(state, [part])
    assert isinstance(state, GroupMoments)
    mean, variance = step.finish(state)
    exact = image.double().reshape(4, -1)
    torch.testing.assert_close(mean.flatten(), exact.mean(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance.flatten(), exact.var(1, correction=0), rtol=1e-6, atol=0)
