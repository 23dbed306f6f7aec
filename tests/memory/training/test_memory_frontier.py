"""The front between memory and time."""

import pytest

from lowtide.core.units import MIB
from lowtide.memory.budget import Budget
from lowtide.memory.choice import choose_plan, pareto_front
from support.small_plans import a_plan


def plans(*points: tuple[int, float, str]):
    return [
        a_plan(device_bytes=mib * MIB, seconds=seconds, accuracy=accuracy, tiles=index + 1)
        for index, (mib, seconds, accuracy) in enumerate(points)
    ]


def test_dominated_plans_are_left_out() -> None:
    given = plans((100, 1.0, "exact"), (50, 2.0, "exact"), (60, 3.0, "exact"), (30, 4.0, "exact"))
    front = pareto_front(given)
    assert [point.upper_bytes // MIB for point in front] == [30, 50, 100]
    assert [point.seconds for point in front] == [4.0, 2.0, 1.0]


def test_an_exact_plan_is_not_beaten_by_a_bounded_one() -> None:
    front = pareto_front(plans((50, 1.0, "bounded"), (60, 2.0, "exact"), (70, 3.0, "bounded")))
    assert [(p.upper_bytes // MIB, p.accuracy) for p in front] == [(50, "bounded"), (60, "exact")]


def test_the_choice_is_marked_and_always_listed() -> None:
    given = plans((100, 1.0, "exact"), (50, 1.01, "exact"), (20, 9.0, "exact"))
    plan = choose_plan(given, Budget(200 * MIB, 200 * MIB, 0))
    assert [point.chosen for point in plan.pareto_front].count(True) == 1
    chosen = next(point for point in plan.pareto_front if point.chosen)
    assert chosen.upper_bytes == plan.upper_bytes


@pytest.mark.parametrize("count", [1, 5])
def test_no_point_of_the_front_beats_another(count: int) -> None:
    given = plans(*[(10 + 7 * (n * 5 % 11), 1.0 + n * 3 % 7, "exact") for n in range(count * 4)])
    front = pareto_front(given)
    for one in front:
        assert not any(
            two.upper_bytes <= one.upper_bytes and two.seconds < one.seconds for two in front
        )
