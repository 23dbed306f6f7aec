"""The helper of the fuzz corpora notices what it is there to notice."""

import os
import time

from support.fuzz_workers import run_all


def _behave(case):
    if case == "raises":
        raise ValueError("a fault")
    if case == "crashes":
        os.abort()
    if case == "exits":
        raise SystemExit(3)
    if case == "hangs":
        time.sleep(600)
    return os.getpid()


def test_each_case_has_its_outcome():
    cases = ["ok", "raises", "ok", "crashes", "ok", "exits", "hangs", "ok"]
    outcomes = run_all(_behave, cases, seconds=3, workers=1)
    assert [one.case for one in outcomes] == cases
    faults = [one.fault.strip().splitlines()[-1] if one.fault else "" for one in outcomes]
    assert faults == [
        "",
        "ValueError: a fault",
        "",
        "the process ended with -6",
        "",
        "SystemExit: 3",
        "no answer within 3 s",
        "",
    ]
    first, second = outcomes[0].result, outcomes[2].result
    assert first == second  # a worker is used again


def test_outcomes_are_in_the_order_of_the_cases():
    outcomes = run_all(_behave, [str(number) for number in range(20)])
    assert [one.case for one in outcomes] == [str(number) for number in range(20)]
    assert not any(one.fault for one in outcomes)
