"""What the benchmark of streamed runs on a GPU computes without one."""

import importlib

import pytest

# The benchmarks are scripts, not a package.
gpu_profile = importlib.import_module("gpu_profile")


def test_copies_are_hidden_where_kernels_run():
    kernels = [(0.0, 4.0), (3.0, 6.0), (10.0, 12.0)]
    assert gpu_profile.overlapped([(1.0, 5.0)], kernels) == 1.0
    assert gpu_profile.overlapped([(5.0, 11.0)], kernels) == pytest.approx(2 / 6)
    assert gpu_profile.overlapped([(1.0, 5.0), (7.0, 9.0)], kernels) == pytest.approx(4 / 6)
    assert gpu_profile.overlapped([(7.0, 9.0)], []) == 0.0
    assert gpu_profile.overlapped([], kernels) is None


def test_a_trace_distinguishes_copies_from_kernels():
    trace = [
        {"ph": "M", "name": "process_name"},
        {"cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 0, "dur": 9},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1, "dur": 2},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 4, "dur": 1.5},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 6, "dur": 1},
        {"cat": "kernel", "name": "conv", "ts": 2, "dur": 3},
    ]
    assert gpu_profile.intervals(trace) == ([(1, 3), (4, 5.5)], [(6, 7), (2, 5)])
