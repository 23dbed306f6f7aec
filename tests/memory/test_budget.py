"""Budgets as people write them."""

import pytest

from lowtide import UsageError
from lowtide.core.units import GIB, MIB
from lowtide.memory.budget import Budget
from lowtide.memory.process_memory import available_host_bytes, total_host_bytes


def test_sizes_are_taken_as_they_are():
    assert Budget.parse("600MiB").device_bytes == 600 * MIB
    assert Budget.parse(5 * MIB).device_bytes == 5 * MIB
    assert Budget.parse("1MiB").device_bytes == MIB
    assert str(Budget.parse("1.5g")) == "1.50 GiB"


def test_on_the_cpu_device_and_host_are_one():
    plain = Budget.parse("1GiB")
    assert plain.host_bytes == plain.device_bytes == GIB
    both = Budget.parse("1GiB", host="700MiB")
    assert both.host_bytes == both.device_bytes == 700 * MIB


def test_shares_of_what_is_free():
    free = available_host_bytes()
    half, automatic = Budget.parse("50%"), Budget.parse("auto")
    assert half.device_bytes == pytest.approx(free / 2, rel=0.1)
    assert automatic.device_bytes == pytest.approx(0.6 * free, rel=0.1)
    assert automatic == Budget.parse(automatic)


def test_disk(tmp_path):
    assert Budget.parse("1GiB", disk="2MiB", scratch=tmp_path).disk_bytes == 2 * MIB
    # A folder that does not exist yet has the disk of the one that will hold it.
    assert Budget.parse("1GiB", scratch=tmp_path / "new" / "er").disk_bytes > 0


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "x%", "%", "nan%"])
def test_percentages_that_make_no_sense(text):
    with pytest.raises(UsageError, match="is not a percentage"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["1023KiB", "6", "5000b"])
def test_less_than_any_run_can_work_in(text):
    with pytest.raises(UsageError, match="a run needs at least") as caught:
        Budget.parse(text)
    assert "2GiB" in caught.value.hint


def test_more_than_the_machine_has():
    with pytest.raises(UsageError, match="budget '900TiB' is more than this machine has"):
        Budget.parse("900TiB")
    with pytest.raises(UsageError, match="disk budget"):
        Budget.parse("1GiB", disk="90000TiB")
    assert Budget.parse(total_host_bytes()).device_bytes == total_host_bytes()


@pytest.mark.parametrize("which", ["host", "disk"])
def test_zero_is_not_automatic(which):
    with pytest.raises(UsageError, match=f"{which} budget"):
        Budget.parse("1GiB", **{which: 0})
