"""Choosing among candidates, by their ledgers alone."""

import pytest
from pydantic import ValidationError

from lowtide import BudgetError, UsageError
from lowtide.core.units import MIB
from lowtide.memory.budget import Budget
from lowtide.memory.choice import choose_plan
from lowtide.memory.plan import (
    ImageGeometry,
    LedgerRow,
    Plan,
    RefusedCandidate,
    StreamedStrategy,
    TiledStrategy,
    WholeStrategy,
)


def candidate(name, mib, seconds=1.0, *, upper=None, accuracy="exact", seams=0.0, **more):
    rows = [
        LedgerRow(
            name="live",
            place="device",
            value=int(mib * MIB),
            upper=int((upper or mib) * MIB),
            origin="probed",
        )
    ]
    rows += [
        LedgerRow(
            name=place, place=place, value=int(size * MIB), upper=int(size * MIB), origin="known"
        )
        for place, size in more.items()
        if place in ("host", "disk")
    ]
    return Plan(
        strategy=dict(
            whole=WholeStrategy(),
            streamed=StreamedStrategy(
                cuts=(),
                bands=(4,),
                pages="memory",
                intermediate_peak_bytes=0,
                graph_digest="",
                panel_width=100,
            ),
            tiled=TiledStrategy(
                tile_width=32,
                tile_height=32,
                overlap=8,
                blend=0,
                tiles=4,
                run_pixels=1024,
                seam_share=seams,
            ),
        )[name],
        accuracy=accuracy,
        device=more.get("device", "cpu"),
        precision="fp32",
        channels_last=False,
        image=ImageGeometry(
            width=100,
            height=80,
            padded_width=100,
            padded_height=80,
            scale=2,
            align=1,
            network_inputs=1,
        ),
        seconds=seconds,
        ledger=tuple(rows),
    )


def budget(mib, host=10**6, disk=10**6):
    return Budget(int(mib * MIB), host * MIB, disk * MIB)


def test_the_fastest_exact_plan_that_fits():
    slow, fast = candidate("streamed", 10, 9), candidate("tiled", 50, 3)
    huge = candidate("whole", 500, 1)
    assert choose_plan([slow, fast, huge], budget(100)).strategy.name == "tiled"
    assert choose_plan([slow, fast, huge], budget(20)).strategy.name == "streamed"


def test_exact_comes_before_fast():
    exact = candidate("whole", 50, 9)
    rough = candidate("tiled", 10, 1, accuracy="bounded", seams=0.1)
    assert choose_plan([rough, exact], budget(100)).strategy.name == "whole"
    assert choose_plan([rough, exact], budget(20)).strategy.name == "tiled"


def test_the_inexact_plan_with_fewest_seams_is_chosen():
    plans = [
        candidate("tiled", 10, 1, accuracy="bounded", seams=0.5),
        candidate("tiled", 50, 9, accuracy="bounded", seams=0.2),
    ]
    assert choose_plan(plans, budget(100)).strategy.seam_share == 0.2


def test_much_memory_must_buy_some_time():
    small, large = candidate("streamed", 20, 1.00), candidate("whole", 1280, 0.99)
    assert choose_plan([small, large], budget(2000)).strategy.name == "streamed"


def test_the_upper_bound_counts():
    with pytest.raises(BudgetError):
        choose_plan([candidate("whole", 10, upper=30)], budget(20))


def test_on_the_cpu_host_bytes_are_device_bytes():
    plan = candidate("whole", 10, host=15)
    assert plan.upper_bytes == 25 * MIB
    with pytest.raises(BudgetError):
        choose_plan([plan], budget(20))
    assert candidate("whole", 10, host=15, device="cuda:0").upper_bytes == 10 * MIB


def test_refusals_say_why_with_numbers():
    chosen = choose_plan(
        [candidate("streamed", 10, 9), candidate("whole", 500, 1), candidate("tiled", 11, 12)],
        budget(100),
    )
    assert [(refusal.title.split()[0], refusal.reason) for refusal in chosen.refused] == [
        ("whole", "needs up to 500 MiB, 100 MiB allowed"),
        ("tiled", "12.0 s and up to 11.0 MiB against 9.0 s and 10.0 MiB"),
    ]
    rough = candidate("tiled", 5, 1, accuracy="bounded")
    (refusal,) = choose_plan([candidate("whole", 10), rough], budget(100)).refused
    assert refusal.reason == "only bounded"
    assert "best of 2 candidates that fit in 100 MiB" in chosen.choice
    assert chosen.budget_bytes == 100 * MIB


def test_when_nothing_fits_the_smallest_is_named_rounded_up():
    plans = [candidate("whole", 30.2), candidate("tiled", 25.4)]
    with pytest.raises(
        BudgetError, match=r"no plan fits in 20.0 MiB: the smallest, tiled.*"
    ) as caught:
        choose_plan(plans, budget(20))
    assert caught.value.smallest == 26 * MIB
    assert caught.value.hint == "--budget 26MiB"
    enough = Budget(caught.value.smallest, caught.value.smallest, 1)
    assert choose_plan(plans, enough).strategy.name == "tiled"


def test_when_only_the_disk_is_too_small():
    with pytest.raises(BudgetError, match=r"needs up to 40\.0 MiB of disk space") as caught:
        choose_plan([candidate("whole", 10, disk=40)], budget(20, disk=30))
    assert "--disk-budget" in caught.value.hint


def test_a_plan_survives_json():
    for name in ("whole", "streamed", "tiled"):
        plan = choose_plan([candidate(name, 10)], budget(20))
        assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_what_belongs_to_another_strategy_is_refused_by_name():
    for name, changes, problem in (
        ("whole", {"strategy": {"name": "whole", "tile_width": 32}}, "whole.tile_width"),
        ("tiled", {"strategy": {"name": "tiled", "bands": [4]}}, "tiled.bands"),
        ("tiled", {"strategy": {"name": "sliced"}}, "'whole', 'tiled', 'streamed'"),
        ("whole", {"accuracy": "bounded"}, "a whole plan is exact"),
        ("streamed", {"compiled": True}, "a streamed network is not compiled"),
        ("whole", {"tile_width": 32}, "tile_width"),
    ):
        with pytest.raises(ValidationError, match=problem):
            Plan.model_validate(candidate(name, 10).model_dump(mode="json") | changes)


def test_exact_refuses_what_only_a_bounded_plan_could_do():
    exact, rough = candidate("whole", 50), candidate("tiled", 10, accuracy="bounded", seams=0.1)
    assert choose_plan([exact, rough], budget(100), "exact").strategy.name == "whole"
    with pytest.raises(BudgetError, match="no exact plan fits") as caught:
        choose_plan([exact, rough], budget(20), "exact")
    assert caught.value.smallest == 50 * MIB
    assert "--accuracy bounded" in caught.value.hint


def test_bounded_is_no_way_out_where_it_does_not_fit_either():
    exact, rough = candidate("whole", 50), candidate("tiled", 30, accuracy="bounded", seams=0.1)
    with pytest.raises(BudgetError) as caught:
        choose_plan([exact, rough], budget(20), "exact")
    assert caught.value.hint == "--budget 50MiB"


def test_fast_takes_the_least_time_exact_or_not():
    exact = candidate("whole", 50, 9)
    rough = candidate("tiled", 50, 1, accuracy="bounded", seams=0.1)
    assert choose_plan([exact, rough], budget(100), "fast").strategy.name == "tiled"


def test_exact_without_any_candidate_says_why():
    rough = candidate("tiled", 10, accuracy="bounded", seams=0.1)
    reason = RefusedCandidate(title="streamed", reason="it draws random numbers")
    with pytest.raises(UsageError, match="draws random numbers"):
        choose_plan([rough], budget(100), "exact", [reason])
    assert reason in choose_plan([rough], budget(100), "bounded", [reason]).refused
