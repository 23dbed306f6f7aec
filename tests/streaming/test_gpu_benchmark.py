"""What the benchmark of streamed runs on a GPU computes without one."""

import importlib
import sys
from pathlib import Path

import pytest

# The benchmarks are scripts, not a package.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
streaming_gpu = importlib.import_module("streaming_gpu")


def test_copies_are_hidden_where_kernels_run():
    kernels = [(0.0, 4.0), (3.0, 6.0), (10.0, 12.0)]
    assert streaming_gpu.overlapped([(1.0, 5.0)], kernels) == 1.0
    assert streaming_gpu.overlapped([(5.0, 11.0)], kernels) == pytest.approx(2 / 6)
    assert streaming_gpu.overlapped([(1.0, 5.0), (7.0, 9.0)], kernels) == pytest.approx(4 / 6)
    assert streaming_gpu.overlapped([(7.0, 9.0)], []) == 0.0
    assert streaming_gpu.overlapped([], kernels) is None
