"""A limit kept by the kernel, tried in a process of its own."""

import os
import subprocess
import sys

import pytest

START = """
import resource
import numpy as np
import torch
from lowtide.memory.oom import is_out_of_memory
from support.process_limit import process_limit

MIB = 1 << 20
torch.set_num_threads(1)
torch.zeros(10)


def take(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8)


def fails(call):
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        assert is_out_of_memory(error), error
        return True
    return False
"""


BODY = """
before = resource.getrlimit(resource.RLIMIT_DATA)
with process_limit(100 * MIB):
    held = take(60)
    assert fails(lambda: take(60))
    assert fails(lambda: np.ones(60 * MIB, np.uint8))
    del held
    assert not fails(lambda: take(60))
    low = resource.getrlimit(resource.RLIMIT_DATA)
    with process_limit(500 * MIB):  # the lower limit stays
        assert resource.getrlimit(resource.RLIMIT_DATA) == low
        assert fails(lambda: take(120))
    assert resource.getrlimit(resource.RLIMIT_DATA) == low
assert resource.getrlimit(resource.RLIMIT_DATA) == before
assert not fails(lambda: take(200))

def overdo():
    with process_limit(50 * MIB):
        take(80)

assert fails(overdo)
assert resource.getrlimit(resource.RLIMIT_DATA) == before
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits data as Linux does")
def test_allocations_beyond_the_limit_fail_and_can_be_survived(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", START + BODY], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
