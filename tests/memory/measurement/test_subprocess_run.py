"""Whole runs in processes of their own: faithful figures, and every way to end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.core.errors import LowtideError, OutOfMemoryError, UsageError
from lowtide.core.units import MIB
from lowtide.memory.measurement.subprocess_run import measure_in_subprocess

LINUX = sys.platform.startswith("linux")

TARGETS = """
import os
import signal
import sys
import time

MIB = 1 << 20
at_import = bytearray(b"1") * (50 * MIB)
calls = 0


def in_turn(*sizes):
    for size in sizes:
        bytearray(b"1") * (size * MIB)
    return {"sizes": sizes, "argv": len(sys.argv)}


class Keeper:
    kept = None

    @classmethod
    def keep(cls, mib):
        cls.kept = bytearray(b"1") * (mib * MIB)


def grow_once():
    global calls, grown
    calls += 1
    if calls == 1:
        grown = bytearray(b"1") * (40 * MIB)
    return calls


def leave(status):
    print("leaving")
    sys.exit(status)


def die(name):
    sys.stderr.write("last words\\n")
    sys.stderr.flush()
    os.kill(os.getpid(), getattr(signal, name))


def vanish():
    os._exit(7)


def fail():
    raise ValueError("no such thing")


def run_out():
    raise MemoryError("none left")


def no_json():
    return object()


def sleep(file):
    with open(file, "w") as out:
        out.write(str(os.getpid()))
    time.sleep(60)


def environment():
    return {name: os.environ.get(name) for name in ("MALLOC_MMAP_THRESHOLD_", "EXTRA")}


def imported():
    return "colorsys" in sys.modules
"""


@pytest.fixture
def targets(tmp_path, monkeypatch):
    (tmp_path / "lowtide_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "lowtide_targets:{}".format


def test_a_peak_is_that_of_the_largest_alone(targets):
    """By default the C heap keeps some of what is freed, and a sampler misses short peaks."""
    usage = measure_in_subprocess(targets("in_turn"), 24, 31, 17)
    assert usage.peak_bytes == pytest.approx(31 * MIB, abs=MIB)
    assert usage.retained_bytes < MIB
    assert usage.result == {"sizes": [24, 31, 17], "argv": 1}
    assert usage.exit_status == 0
    assert usage.seconds >= 0 <= usage.cpu_seconds
    row = usage.ledger[0]
    assert (row.value, row.origin) == (usage.peak_bytes, "measured")
    if LINUX:
        assert usage.high_water_bytes is None or row.upper <= usage.high_water_bytes + MIB


def test_retained_bytes(targets):
    usage = measure_in_subprocess(targets("Keeper.keep"), 20)
    assert usage.retained_bytes == pytest.approx(20 * MIB, abs=MIB)
    assert usage.result is None


def test_warmups_leave_out_one_time_costs(targets):
    assert measure_in_subprocess(targets("grow_once")).peak_bytes > 39 * MIB
    warm = measure_in_subprocess(targets("grow_once"), warmups=2)
    assert warm.peak_bytes < 2 * MIB
    assert warm.result == 3


def test_imports_come_before_the_baseline(targets):
    assert measure_in_subprocess(targets("imported")).result is False
    assert measure_in_subprocess(targets("imported"), imports=["colorsys"]).result is True


@pytest.mark.skipif(not LINUX, reason="glibc's setting")
def test_the_allocator_is_named_and_can_be_set(targets):
    usage = measure_in_subprocess(targets("environment"), env={"EXTRA": "1"})
    assert usage.result == {"MALLOC_MMAP_THRESHOLD_": "65536", "EXTRA": "1"}
    if usage.allocator.startswith("glibc"):
        assert usage.allocator.endswith("MALLOC_MMAP_THRESHOLD_=65536")
    other = measure_in_subprocess(targets("environment"), env={"MALLOC_MMAP_THRESHOLD_": "131072"})
    assert other.result["MALLOC_MMAP_THRESHOLD_"] == "131072"
    assert other.allocator != usage.allocator or not usage.allocator.startswith("glibc")
    unset = measure_in_subprocess(targets("environment"), env={"MALLOC_MMAP_THRESHOLD_": None})
    assert unset.result["MALLOC_MMAP_THRESHOLD_"] is None


@pytest.mark.skipif(not LINUX, reason="glibc's setting")
def test_a_run_that_tunes_its_heap_is_detected():
    usage = measure_in_subprocess("lowtide.core.heap:tune_heap")
    assert ("tuned by the run" in usage.allocator) == usage.result


def test_a_script_with_words(tmp_path):
    script = tmp_path / "my script.py"
    (tmp_path / "helper.py").write_text("word = 'helped'\n")
    script.write_text(
        "import sys, helper\n"
        "if __name__ == '__main__':\n"
        "    bytearray(b'1') * (30 << 20)\n"
        "    print(helper.word, *sys.argv[1:])\n"
        "    sys.exit('no')\n"
    )
    usage = measure_in_subprocess(script, "a b", 3, Path("c"))
    assert usage.peak_bytes == pytest.approx(30 * MIB, abs=MIB)
    assert usage.stdout == "helped a b 3 c\n"
    assert (usage.exit_status, usage.stderr) == (1, "no\n")


def test_the_runs_own_exit_status_is_no_error(targets):
    usage = measure_in_subprocess(targets("leave"), 3)
    assert (usage.exit_status, usage.stdout) == (3, "leaving\n")
    assert measure_in_subprocess(targets("leave"), None).exit_status == 0


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (("fail",), LowtideError, ["raised ValueError: no such thing", "Traceback"]),
        (("run_out",), OutOfMemoryError, ["ran out of memory: MemoryError: none left"]),
        (("vanish",), LowtideError, ["ended with status 7"]),
        (("no_json",), UsageError, ["not JSON"]),
        (("nothing",), UsageError, ["could not be imported", "nothing"]),
    ],
)
def test_ends_that_are_errors(targets, call, kind, words):
    with pytest.raises(kind) as error:
        measure_in_subprocess(targets(call[0]), *call[1:])
    assert type(error.value) is kind
    assert all(word in str(error.value) for word in words)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signals")
@pytest.mark.parametrize(
    ("name", "kind"), [("SIGKILL", OutOfMemoryError), ("SIGABRT", LowtideError)]
)
def test_a_child_killed_by_a_signal(targets, name, kind):
    with pytest.raises(kind, match=rf"killed by {name}(.|\n)*last words") as error:
        measure_in_subprocess(targets("die"), name)
    assert type(error.value) is kind


@pytest.mark.skipif(not LINUX, reason="limits data as Linux does")
def test_a_real_lack_of_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    script = tmp_path / "limited.py"
    script.write_text(
        "from support.process_limit import process_limit\n"
        "with process_limit(32 << 20):\n"
        "    bytearray(256 << 20)\n"
    )
    with pytest.raises(OutOfMemoryError, match="MemoryError"):
        measure_in_subprocess(script)


def test_a_child_that_takes_too_long_is_ended(targets, tmp_path):
    file = tmp_path / "process"
    start = time.monotonic()
    with pytest.raises(LowtideError, match="did not end within 1 s"):
        measure_in_subprocess(targets("sleep"), str(file), timeout=1.0)
    assert time.monotonic() - start < 30
    if LINUX and file.exists():
        assert not Path(f"/proc/{file.read_text()}").exists()


def test_targets_that_cannot_be_run(tmp_path, targets):
    with pytest.raises(UsageError, match="not an existing script"):
        measure_in_subprocess(tmp_path / "missing.py")
    with pytest.raises(UsageError, match="JSON"):
        measure_in_subprocess(targets("in_turn"), object())
    script = tmp_path / "script.py"
    script.write_text("pass\n")
    with pytest.raises(UsageError, match="runs once"):
        measure_in_subprocess(script, warmups=1)


def test_the_child_needs_no_torch():
    code = "import sys, lowtide.memory.measurement._subprocess_main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_resident_memory_is_that_of_the_memory_events(tmp_path, monkeypatch):
    (tmp_path / "lowtide_convolutions.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from lowtide.memory.measurement.region import measure\n"
        "net = nn.Sequential(*[nn.Conv2d(32, 32, 3, padding=1) for _ in range(4)])\n"
        "def run(side):\n"
        "    with measure('cpu') as region, torch.inference_mode():\n"
        "        net(torch.rand(1, 32, side, side))\n"
        "    return region.peak_bytes\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for side in (128, 256, 384):
        usage = measure_in_subprocess("lowtide_convolutions:run", side, warmups=1)
        assert usage.peak_bytes == pytest.approx(usage.result, abs=2 * MIB)
