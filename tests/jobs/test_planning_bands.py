"""When bands are planned, and what follows where a network cannot be run by them."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide import BudgetError, UsageError
from lowtide.jobs.images.planning import choose_image_plan
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.streaming.planner.model_facts import ImageTask, ModelGeometry
from lowtide.streaming.planner.program_cache import StreamPlannerCache
from support.toy_models import GIB, Centered, conv_net, costs, network

MIB = 1 << 20


class Drawing(nn.Module):
    """Draws random numbers, which bands would draw otherwise."""

    def forward(self, x):
        return x + 0 * torch.rand_like(x).repeat_interleave(1, 0)


def chosen(module, mib, *, scale=1, size=600, below=None, images=1, **settings):
    """(candidates, plan) for a square picture, of a network that tiles cannot do exactly."""
    net = network(module.eval(), scale=scale)
    prepared = PreparedModel(
        None,  # pyright: ignore[reportArgumentType]
        net,
        ModelGeometry(scale, 3, 3),
        costs(None),
        "fp32",
        StreamPlannerCache(net),
    )
    picture = ImageTask((size, size, 3), (size, size), ample_bytes=mib * MIB // 4)
    budget = Budget(mib * MIB, GIB, 100 * GIB)
    return choose_image_plan(
        prepared, UpscaleSettings.of(**settings), picture, budget, below, images
    )


def global_net():
    return nn.Sequential(conv_net(scale=1, features=16), Centered())


def reason(plan):
    return next((one.reason for one in plan.refused if one.title.startswith("streamed")), "")


def test_bands_are_planned_where_they_may_save_more_than_planning_them_takes():
    plans, plan = chosen(global_net(), 1000)
    assert plan.strategy.name == "whole"
    assert re.search("planning it takes about .+ s, and .+ save at most .+", reason(plan))
    assert not any(one.strategy.name == "streamed" for one in plans)
    plans, _ = chosen(global_net(), 1000, images=1000)
    assert any(one.strategy.name == "streamed" for one in plans)


def test_bands_are_the_way_where_the_whole_does_not_fit():
    _, plan = chosen(global_net(), 200)
    assert (plan.strategy.name, plan.accuracy) == ("streamed", "exact")
    assert {one.title.split()[0] for one in plan.refused} == {"whole", "tiled"}
    # From a dry run, not a rough estimate: the ledger has the operators' own rows.
    assert any(row.name == "live activations" for row in plan.ledger)
    assert plan.upper_bytes <= 200 * MIB


def test_exact_names_the_least_that_would_do():
    with pytest.raises(BudgetError) as caught:
        chosen(global_net(), 50)
    _, plan = chosen(global_net(), caught.value.smallest // MIB)
    assert plan.accuracy == "exact"


def test_a_model_that_cannot_be_streamed_is_refused_or_tiled_as_requested():
    with pytest.raises(BudgetError, match="random numbers"):
        chosen(Drawing(), 150)
    _, plan = chosen(Drawing(), 150, accuracy="bounded")
    assert (plan.strategy.name, plan.accuracy) == ("tiled", "bounded")
    assert any("random numbers" in one.reason for one in plan.refused)


def test_streamed_alone_cannot_be_had_of_everything():
    with pytest.raises(UsageError, match="random numbers"):
        chosen(Drawing(), 150, strategy="streamed")


def test_bands_that_are_not_the_whole_are_not_run(monkeypatch):
    from lowtide.core.errors import ModelError

    def differ(self, height, width):
        raise ModelError("bands of this model differ from the whole by 1e-01 of its range")

    monkeypatch.setattr(StreamPlannerCache, "certificate", differ)
    with pytest.raises(BudgetError, match="differ from the whole"):
        chosen(global_net(), 200)
    _, plan = chosen(global_net(), 200, accuracy="bounded")
    assert plan.strategy.name == "tiled"


def test_after_memory_ran_out_less_is_planned():
    _, first = chosen(global_net(), 300, strategy="streamed")
    _, second = chosen(global_net(), 300, strategy="streamed", below=first.upper_bytes)
    assert second.upper_bytes < first.upper_bytes


def test_a_plan_does_not_depend_on_what_was_planned_before(tmp_path, save, photo):
    plain = save(tmp_path / "plain.png", photo[:320, :320])
    alpha = np.concatenate([photo[:320, :320], photo[:320, :320, :1]], 2)
    clear = save(tmp_path / "clear.png", alpha)

    def planned(*files):
        out = tmp_path / "out"
        report = lowtide.plan(files, out, budget="80MiB", strategy="streamed")
        return [image.plan.model_dump_json() for image in report.images]

    # Both are of the same size, and the second has less room beside what it holds.
    assert planned(plain, clear) == planned(plain) + planned(clear)
