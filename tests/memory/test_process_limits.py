"""Limits of a container and of ``ulimit``, which budgets keep to."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from lowtide.core.units import MIB
from lowtide.memory.budget import Budget
from lowtide.memory.process_memory import MemoryLimit, memory_limits, total_host_bytes

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
        "user/memory.stat": "anon 610\ninactive_file 30\nactive_file 40\n",
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
        "memory/docker/ab/memory.stat": "cache 3\ntotal_inactive_file 80\ntotal_active_file 40\n",
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


@pytest.fixture(params=[False, True], ids=["loaded", "to come"])
def to_come(request, monkeypatch):
    """Bytes of the modules for planning that are imported later: in private memory."""
    for name in ("torch._dynamo", "torch.export._trace"):
        if request.param:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, sys)
    return 112 * MIB * request.param


def test_a_budget_is_what_a_limit_leaves(to_come):
    asked = Budget(1 << 30, 1 << 30, 1 << 40)
    wide = MemoryLimit(8 << 30, 2 << 30, "ulimit -v", "addresses")
    tight = MemoryLimit(1 << 30, 300 * MIB, "the memory limit of the container")
    assert asked.within([]) is asked
    loose = asked.within([wide])
    assert (loose.device_bytes, loose.host_bytes, loose.note) == (1 << 30, 1 << 30, "")
    smaller = asked.within([wide, tight])
    left = 300 * MIB - to_come
    assert smaller.device_bytes == smaller.host_bytes == left
    assert smaller.note == (
        f"the budget is {left // MIB} MiB, which is left of 1.00 GiB by the memory limit of the"
        " container"
    )
    card = Budget(6 << 30, 1 << 30, 1 << 40, "cuda:0").within([tight])
    assert (card.device_bytes, card.host_bytes) == (6 << 30, left)


def test_a_refusal_names_a_limit_that_leaves_its_budget(to_come):
    """Also where planning takes its share of the higher limit only."""
    asked = Budget(1 << 30, 1 << 30, 1 << 40)

    def within(mebibytes):
        free = (mebibytes - 900) * MIB
        return asked.within([MemoryLimit(mebibytes * MIB, free, "ulimit -d", "data")])

    refused = within(1010)  # 14 MiB beside stacks
    for needed in (20, 93, 240):
        hint = refused.hint_for(needed * MIB)
        assert hint.startswith("raise ulimit -d to ") and hint.endswith(f"and --budget {needed}MiB")
        assert within(int(hint.split()[4])).device_bytes >= needed * MIB
    assert refused.hint_for(14 * MIB) == "--budget 14MiB"
    assert asked.hint_for(1 << 40) == f"--budget {1 << 20}MiB"


def test_too_little_for_planning_is_all_for_the_budget(to_come):
    asked = Budget(1 << 30, 1 << 30, 1 << 40)
    tight = MemoryLimit(1 << 30, 100 * MIB, "the memory limit of the container")
    assert asked.within([tight]).device_bytes == 100 * MIB


def test_stacks_have_room_beside_a_budget(to_come):
    asked = Budget(1 << 30, 1 << 30, 1 << 40)
    for counts in ("data", "addresses"):
        tight = MemoryLimit(1 << 30, 140 * MIB, "ulimit", counts)
        assert asked.within([tight]).device_bytes == 44 * MIB


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


def python(code, *words, limit):
    """Run code in a process of its own under a limit of the shell in bytes."""
    begin = "import resource, sys; which, most = int(sys.argv[1]), int(sys.argv[2])\n"
    begin += "resource.setrlimit(which, (most, most))\n"
    which, most = limit
    return subprocess.run(
        [sys.executable, "-c", begin + code, str(which), str(most), *map(str, words)],
        capture_output=True,
        text=True,
    )


COMMAND = "from lowtide.cli.main import main; main(sys.argv[3:])"


@pytest.mark.parametrize(
    ("which", "most", "name"),
    [(resource.RLIMIT_AS, 500 * MIB, "-v"), (resource.RLIMIT_DATA, 100 * MIB, "-d")],
)
def test_a_limit_below_what_the_libraries_take(tmp_path, monkeypatch, which, most, name):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    run = python(COMMAND, "upscale", "x.png", "-o", tmp_path / "y.png", limit=(which, most))
    assert run.returncode == 3, run.stderr
    assert run.stderr.startswith("error: the libraries of Lowtide")
    assert f"{most // MIB} MiB by ulimit {name}" in run.stderr
    assert "hint: raise that limit" in run.stderr


def test_libraries_that_do_not_end_where_memory_runs_out(tmp_path, monkeypatch):
    """As OpenBLAS, which asks for more again and again."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "endless.py").write_text("while True:\n    pass\n")
    code = """
sys.path.insert(0, sys.argv[3])
from lowtide.memory import library_memory
library_memory._MOST_SECONDS = 1
try:
    library_memory.require_room_for_libraries("endless")
except library_memory.BudgetError as error:
    print(error, error.hint)
"""
    run = python(code, tmp_path, limit=(resource.RLIMIT_DATA, 500 * MIB))
    assert "the libraries of Lowtide do not fit in 500 MiB by ulimit -d" in run.stdout, run.stderr
    assert "is ample" in run.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_planning_imports():
    """Is not more than limits are asked for, and not far less."""
    code = """
import json, torch
from torch import nn
from lowtide.core.heap import trim_heap
from lowtide.memory.library_memory import _planning_bytes, _sizes
from lowtide.streaming.planner.program_cache import import_capture_libraries
from lowtide.streaming.probe.trace_memory import import_tracing_libraries
trim_heap(collect=True)
before, asked = _sizes(), {counts: _planning_bytes(counts) for counts in _sizes()}
import_tracing_libraries(), import_capture_libraries()
trim_heap(collect=True)
taken = {counts: size - before[counts] for counts, size in _sizes().items()}
print(json.dumps([taken, asked, _planning_bytes("resident")]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    taken, asked, still = json.loads(run.stdout)
    assert still == 0
    for counts, size in taken.items():
        assert asked[counts] / 2 < size <= asked[counts], (counts, taken, asked)


def test_a_network_is_not_planned_where_a_limit_leaves_too_little():
    code = """
import torch
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + (200 << 20), most))
import lowtide
try:
    lowtide.stream(torch.nn.Conv2d(3, 3, 3).eval()).prepare(torch.zeros(1, 3, 9, 9))
except lowtide.BudgetError as error:
    print(error, error.hint)
"""
    run = python(code, limit=(resource.RLIMIT_DATA, 1 << 40))
    assert "capturing a network is not possible: the libraries for it take 112 MiB" in run.stdout
    assert "raise that limit to" in run.stdout
