"""Questions to the platform, and the rules that follow from the answers."""

import sys

import pytest

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.units import GIB, MIB
from lowtide.memory.platform import (
    allocator_memory_fraction,
    current_platform,
    override_platform,
    spill_warning,
)

NAMES = ("linux", "windows", "darwin", "wsl")


@pytest.fixture(params=NAMES)
def platform(request):
    with override_platform(request.param) as platform:
        yield platform


def test_this_machine_is_one_of_them():
    expected = {"win32": {"windows"}, "linux": {"linux", "wsl"}}
    assert current_platform().name in expected.get(sys.platform, {"darwin"})


def test_a_pretended_platform_ends_with_its_block():
    real = current_platform()
    with override_platform("windows") as windows:
        assert current_platform() is windows
        with override_platform("darwin"):
            assert current_platform().name == "darwin"
        assert current_platform() is windows
    assert current_platform() is real
    with pytest.raises(KeyError), override_platform("wsl"):
        raise KeyError
    assert current_platform() is real


def test_an_unknown_platform_is_refused():
    with pytest.raises(UsageError, match="beos"), override_platform("beos"):
        pass


def test_what_differs():
    facts = {}
    for name in NAMES:
        with override_platform(name) as platform:
            facts[name] = platform
    assert [name for name in NAMES if facts[name].expandable_segments] == ["linux"]
    assert [name for name in NAMES if facts[name].spills_to_shared_memory] == ["windows", "wsl"]
    assert [name for name in NAMES if facts[name].pinned_share < 0.5] == ["windows", "wsl"]
    assert [name for name in NAMES if not facts[name].rename_over_open_files] == ["windows"]
    assert [name for name in NAMES if facts[name].process_data_limit] == ["linux", "wsl"]
    assert [name for name in NAMES if facts[name].high_water_mark] == ["linux", "wsl"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks a Linux kernel")
def test_a_limit_on_data_and_a_resettable_mark_are_there():
    import resource
    from pathlib import Path

    platform = current_platform()
    assert platform.process_data_limit == hasattr(resource, "RLIMIT_DATA")
    assert platform.high_water_mark == ("VmHWM" in Path("/proc/self/status").read_text())


def test_a_small_budget_caps_the_allocator_everywhere(platform):
    """What is left for the allocator is the budget without the context."""
    cap = allocator_memory_fraction(platform, 4 * GIB, 8 * GIB, 512 * MIB)
    assert cap == (4 * GIB - 512 * MIB) / (8 * GIB)


@pytest.mark.parametrize("budget", [8 * GIB, 100 * GIB])
def test_only_drivers_that_spill_are_capped_below_the_card(platform, budget):
    cap = allocator_memory_fraction(platform, budget, 8 * GIB, 512 * MIB)
    if platform.spills_to_shared_memory:
        assert cap is not None
        assert cap * 8 * GIB == 8 * GIB - 600 * MIB - 512 * MIB
    else:
        assert cap is None


def test_a_budget_that_the_context_takes_is_refused(platform):
    with pytest.raises(BudgetError, match="nothing is left"):
        allocator_memory_fraction(platform, 512 * MIB, 8 * GIB, 512 * MIB)


COLLAPSES = {
    "steady": ([1.0] * 12, False),
    "slow start": ([9.0] + [1.0] * 8, False),
    "one slow batch": ([1.0] * 8 + [50.0], False),
    "slower": ([1.0] * 6 + [3.9] * 3, False),
    "collapsed": ([1.0] * 6 + [4.1] * 3, True),
    "collapsed but for one": ([1.0] * 6 + [30.0, 1.0, 30.0], True),
    "too few to say": ([1.0, 1.0, 30.0, 30.0, 30.0], False),
    "none": ([], False),
}


@pytest.mark.parametrize(("seconds", "collapsed"), COLLAPSES.values(), ids=COLLAPSES)
def test_a_collapse_is_lasting_and_large(seconds, collapsed):
    with override_platform("windows") as windows:
        assert (spill_warning(seconds, platform=windows) is not None) == collapsed


def test_a_collapse_means_spilling_only_where_drivers_spill(platform):
    sentence = spill_warning([0.5] * 3 + [12.0] * 3, platform=platform)
    assert (sentence is not None) == platform.spills_to_shared_memory
    if sentence:
        assert "12.0 s" in sentence
        assert "0.5 s" in sentence
