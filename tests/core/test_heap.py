"""The C heap, in processes of their own: its settings are for a whole process."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

GLIBC = platform.libc_ver()[0] == "glibc"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def _gives_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return GLIBC and setting.exists() and "[madvise]" in setting.read_text()


def run(code, **settings):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment = {name: value for name, value in kept.items() if name != HUGE_PAGES}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment | settings
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_tuning_says_whether_it_worked():
    code = (
        "from lowtide.core.heap import *; from lowtide.core.heap import heap_is_tuned;"
        "print(heap_is_tuned(), tune_heap(), heap_is_tuned())"
    )
    assert run(code) == f"False {GLIBC} {GLIBC}"


@pytest.mark.skipif(not GLIBC, reason="the modes are glibc's")
@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "default"),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, "trim"),
        ({"MALLOC_MMAP_THRESHOLD_": "99999999"}, None),
        ({"MALLOC_ARENA_MAX": "1"}, None),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, None),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=off"}, "default"),
    ],
)
def test_the_mode_of_a_heap_is_known_where_its_settings_are(settings, mode):
    code = "from lowtide.core.heap import heap_mode, tune_heap; print(heap_mode())"
    assert run(code, **settings) == str(mode)
    assert run(f"{code}; tune_heap(); print(heap_mode())", **settings).split()[-1] == "cache"


@pytest.mark.skipif(not GLIBC, reason="only glibc keeps freed memory so")
def test_a_tuned_heap_keeps_memory_until_it_is_trimmed():
    code = (
        "from lowtide.core.heap import tune_heap, trim_heap\n"
        "from lowtide.memory.process_memory import anonymous_bytes\n"
        "tune_heap(); start = anonymous_bytes()\n"
        "pieces = [bytearray(8 << 20) for _ in range(8)]\n"
        "for piece in pieces: piece[::4096] = bytes([1]) * 2048\n"
        "full = anonymous_bytes(); del pieces, piece\n"
        "kept = anonymous_bytes(); trim_heap(collect=True); rest = anonymous_bytes()\n"
        "print(full - start > 60 << 20, kept - start > 40 << 20, rest - start < 10 << 20)"
    )
    assert run(code) == "True True True"


@pytest.mark.skipif(not GLIBC, reason="only glibc keeps freed memory so")
def test_a_trimming_heap_keeps_nothing_until_it_may():
    code = (
        "from lowtide.core.heap import tune_heap, set_heap_mode\n"
        "from lowtide.memory.process_memory import anonymous_bytes\n"
        "def kept():\n"
        "    start = anonymous_bytes()\n"
        "    pieces = [bytearray(8 << 20) for _ in range(8)]\n"
        "    for piece in pieces: piece[::4096] = bytes([1]) * 2048\n"
        "    del pieces, piece\n"
        "    return anonymous_bytes() - start > 40 << 20\n"
        "tune_heap(); set_heap_mode('trim'); first = kept()\n"
        "set_heap_mode('cache'); print(first, kept())"
    )
    assert run(code) == "False True"


@pytest.mark.skipif(not _gives_huge_pages(), reason="huge pages for who asks: not set here")
@pytest.mark.parametrize("setting", [None, "0"])
def test_large_tensors_come_in_huge_pages_unless_the_user_said_no(setting):
    code = (
        "from lowtide.core.heap import tune_heap; tune_heap(); import torch\n"
        "tensor = torch.ones(64 << 20, dtype=torch.uint8)\n"
        "lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "(line,) = (line for line in lines if line.startswith('AnonHugePages'))\n"
        "print(int(line.split()[1]) << 10 > 40 << 20)"
    )
    settings = {} if setting is None else {HUGE_PAGES: setting}
    assert run(code, **settings) == str(setting is None)


@pytest.mark.skipif(not GLIBC, reason="only glibc has these settings")
def test_another_heap_is_left_alone():
    code = (
        "import lowtide.core.heap as heap\n"
        "class Library:\n"
        "    def __init__(self): self.calls = 0\n"
        "    def mallopt(self, *_): self.calls += 1; return 1\n"
        "    def malloc_trim(self, _): self.calls += 1\n"
        "library = Library(); heap._glibc = lambda: library\n"
        "heap.set_heap_mode('cache'); before = library.calls\n"
        "heap.tune_heap(); heap.set_heap_mode('trim'); print(before, library.calls > 2)"
    )
    assert run(code) == "0 True"


@pytest.mark.skipif(not GLIBC, reason="only glibc takes blocks from gaps so")
def test_blocks_freed_while_the_heap_trims_leave_no_gaps():
    code = (
        "from contextlib import nullcontext\n"
        "from lowtide.core.heap import trimming_heap, trim_heap, tune_heap, set_heap_mode\n"
        "from lowtide.memory.process_memory import anonymous_bytes\n"
        "def filled(size): return bytearray(b'1') * size\n"
        "tune_heap()\n"
        "with HOW():\n"
        "    read = [(filled(2 << 20), filled(60 << 10)) for _ in range(32)]\n"
        "    kept = [small for large, small in read]; del read\n"
        "trim_heap(); set_heap_mode('trim')\n"
        "start = anonymous_bytes(); pieces = [filled(1 << 20) for _ in range(16)]; del pieces\n"
        "print(anonymous_bytes() - start > 8 << 20)"
    )
    found = [run(code.replace("HOW", how)) for how in ("nullcontext", "trimming_heap")]
    assert found == ["True", "False"]


@pytest.mark.skipif(not GLIBC, reason="the heap is tuned for glibc only")
def test_kernels_of_many_sizes_do_not_pile_up():
    code = (
        "from lowtide.core.heap import tune_heap, trim_heap; tune_heap(); import torch\n"
        "from lowtide.memory.process_memory import anonymous_bytes\n"
        "torch.set_num_threads(1); network = torch.nn.Conv2d(32, 32, 3).requires_grad_(False)\n"
        "def held(sizes):\n"
        "    for size in sizes: network(torch.zeros(1, 32, 8, size))\n"
        "    trim_heap(collect=True); return anonymous_bytes()\n"
        "few = held(range(8, 148)); print(held(range(148, 448)) - few < 2 << 20)"
    )
    assert run(code) == "True"
