"""Limits of a container and of ``ulimit``, which budgets keep to."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from lowtide.core.units import MIB
from lowtide.memory.budget import Budget
from lowtide.memory.memory_limits import MemoryLimit, memory_limits
from lowtide.memory.meter import total_host_bytes

SECOND = "0::/user/job\n"
FIRST = "4:memory:/docker/ab\n0::/\n"
NONE = 9223372036854771712


def write_groups(root, lines, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def group_limits(root):
    return [one for one in memory_limits(root) if "container" in one.name]


def test_the_limits_of_a_group_and_of_its_parents_hold(tmp_path):
    files = {
        "user/memory.max": 1000,
        "user/memory.current": 700,
        "user/memory.stat": "anon 650\ninactive_file 50\n",
        "user/job/memory.max": "max\n",
        "user/job/memory.current": 600,
        "user/job/memory.stat": "anon 600\n",
        "memory.max": 5000,
        "memory.current": 900,
        "memory.stat": "inactive_file 0\n",
    }
    write_groups(tmp_path, SECOND, files)
    found = group_limits(tmp_path)
    assert [(one.limit_bytes, one.free_bytes) for one in found] == [(1000, 350), (5000, 4100)]


def test_a_group_of_the_first_version(tmp_path):
    files = {
        "memory/docker/ab/memory.limit_in_bytes": 2000,
        "memory/docker/ab/memory.usage_in_bytes": 2500,
        "memory/docker/ab/memory.stat": "cache 3\ntotal_inactive_file 100\n",
        "memory/memory.limit_in_bytes": NONE,
        "memory/memory.usage_in_bytes": 9,
        "memory/memory.stat": "",
    }
    write_groups(tmp_path, FIRST, files)
    assert [(one.limit_bytes, one.free_bytes) for one in group_limits(tmp_path)] == [(2000, 0)]


def test_no_group_and_no_files(tmp_path):
    assert group_limits(tmp_path) == []
    write_groups(tmp_path, "0::/../elsewhere\n", {})
    assert group_limits(tmp_path) == []


def test_a_budget_is_what_a_limit_leaves():
    asked = Budget(1 << 30, 1 << 30, 1 << 40)
    wide = MemoryLimit(8 << 30, 2 << 30, "ulimit -v")
    tight = MemoryLimit(1 << 30, 300 * MIB, "the memory limit of the container")
    assert asked.within([]) is asked.within([wide]) is asked
    smaller = asked.within([wide, tight])
    assert smaller.device_bytes == smaller.host_bytes == 300 * MIB
    assert smaller.note == (
        "the budget is 300 MiB, which is left of 1.00 GiB by the memory limit of the container"
    )
    card = Budget(6 << 30, 1 << 30, 1 << 40, "cuda:0").within([tight])
    assert (card.device_bytes, card.host_bytes) == (6 << 30, 300 * MIB)


@pytest.mark.parametrize("which", [resource.RLIMIT_DATA, resource.RLIMIT_AS])
def test_budgets_under_a_limit_of_the_shell(which):
    """In a process of its own: auto, the limit itself, and more than that."""
    limit = 8 << 30
    if total_host_bytes() < limit:
        pytest.skip("wants a machine of 8 GiB")
    code = f"""
import resource
resource.setrlimit({which}, ({limit}, {limit}))
from lowtide.memory.budget import Budget
auto, large = Budget.parse("auto"), Budget.parse({limit})
assert auto.device_bytes <= .6 * {limit}, auto
assert auto.device_bytes < large.device_bytes < {limit} and "ulimit" in large.note, large
larger = Budget.parse("9GiB")
assert larger.device_bytes < {limit} and "left of 8.00 GiB by ulimit" in larger.note, larger
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
