"""Plans from files: found by name and size, and refused where they do not suit."""

import json

import pytest

from lowtide import BudgetError, UsageError
from lowtide.memory.budget import Budget
from lowtide.memory.plan import Plan, StreamedStrategy
from lowtide.memory.plan_file import PlanFile, plan_for_replay
from support.small_plans import MIB, a_plan


def book(path, *plans: tuple[str, Plan]) -> PlanFile:
    images = [{"input": name, "plan": plan.model_dump(mode="json")} for name, plan in plans]
    path.write_text(json.dumps({"images": images}))
    return PlanFile.read(path)


def test_a_plan_by_itself_is_a_book(tmp_path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(a_plan().model_dump_json())
    assert PlanFile.read(path).find("any.png", 100, 80) == a_plan()


def test_the_plan_of_the_name_comes_before_that_of_the_size(tmp_path) -> None:
    first, second = a_plan(overlap=14), a_plan(overlap=20)
    plans = book(tmp_path / "p.json", ("one.png", first), ("in/two.png", second))
    assert plans.find("two.png", 100, 80).strategy.overlap == 20
    assert plans.find("other.png", 100, 80).strategy.overlap == 14


def test_no_plan_for_another_size_and_the_sizes_there_are(tmp_path) -> None:
    plans = book(tmp_path / "p.json", ("one.png", a_plan()))
    with pytest.raises(UsageError, match=r"no plan for one\.png, which is 90×80") as caught:
        plans.find("one.png", 90, 80)
    assert "100×80" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"images": []}', '{"strategy": "tiled"}'])
def test_files_that_hold_no_plan(tmp_path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="plan"):
        PlanFile.read(path)


def test_plans_of_another_layout_are_refused_with_the_way_out(tmp_path) -> None:
    path, plan = tmp_path / "p.json", a_plan().model_dump(mode="json")
    for changes, problem in (
        ({"schema_version": 1}, "a plan of schema 1"),
        ({"accuracy": "bounded", "strategy": {"name": "whole"}}, "not a plan: a whole plan"),
        ({"strategy": {"name": "whole", "bands": [4]}}, "not a plan: strategy.whole.bands: "),
        ({"precision": "int8"}, "precision: input should be .*'bf16' or 'fp16', not 'int8'$"),
    ):
        path.write_text(json.dumps(plan | changes))
        with pytest.raises(UsageError, match=problem) as caught:
            PlanFile.read(path)
        assert "lowtide plan upscale" in caught.value.hint


def test_bands_planned_by_an_earlier_release(tmp_path) -> None:
    path = tmp_path / "p.json"
    bands = StreamedStrategy(
        cuts=(),
        bands=(4,),
        pages="memory",
        intermediate_peak_bytes=0,
        graph_digest="",
        panel_width=100,
    )
    plan = a_plan().model_copy(update={"strategy": bands})

    def read(**gone):
        earlier = bands.model_dump(mode="json") | gone
        path.write_text(json.dumps(plan.model_dump(mode="json") | {"strategy": earlier}))
        return PlanFile.read(path).first

    assert read(arena_bytes=0, recompute_limit=0) == plan
    for name in ("arena_bytes", "recompute_limit"):
        with pytest.raises(UsageError, match=rf"{name}: .*; make the plan again"):
            read(**{name: 128})


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json"):
        PlanFile.read(tmp_path / "nowhere.json")


def test_a_plan_of_other_weights_is_refused() -> None:
    budget = Budget(100 * MIB, 100 * MIB, 0)
    with pytest.raises(UsageError, match="model sha256 is abc, but this run has def"):
        plan_for_replay(a_plan(), {"model_sha256": "def"}, budget)


def test_a_plan_over_the_budget_is_refused_with_what_it_needs() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_for_replay(a_plan(), {}, Budget(40 * MIB, 40 * MIB, 0))
    assert caught.value.hint == "--budget 50MiB"


def test_a_plan_that_suits_is_taken_with_the_budget_of_now() -> None:
    plan = plan_for_replay(a_plan(), {"scale": 2}, Budget(60 * MIB, 60 * MIB, 0))
    assert plan.budget_bytes == 60 * MIB
    assert (plan.strategy.tile_width, plan.strategy.overlap) == (64, 14)
