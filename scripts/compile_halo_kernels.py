"""Compile the halo kernels for GPUs that are absent.

    python scripts/compile_halo_kernels.py --capability 8.6 --type bf16 --window 32 --shared 8

Prints a line of JSON for each kernel, with the shared memory it takes and that the GPU has. Needs
Triton, but no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from lowtide.attention.halo import kernels
from lowtide.attention.halo.launch import (
    SHARED_MEMORY,
    choose_tiles,
    descriptor_block,
    kernel_constants,
)
from lowtide.attention.spatial.window_grid import WindowGeometry

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Name of each kernel's tile in `KernelTiles`.
KERNELS = {
    "forward": "forward",
    "backward_query": "query",
    "backward_key": "key",
    "backward_bias": "bias",
}
# Pointers to fp32, independent of the tensors' dtype.
_FP32_POINTERS = {"sums", "to_bias", "table"}
_POINTERS = {"q", "k", "v", "out", "given", "to_q", "to_k", "to_v"} | _FP32_POINTERS
# How many numbers each kernel's argument ``grid`` has, and how many tensors ``strides``.
_GRIDS = {"forward": 6, "backward_query": 6, "backward_key": 8, "backward_bias": 3}
_TENSORS = {"forward": 4, "backward_query": 5, "backward_key": 5, "backward_bias": 4}


def compile_halo_kernel(
    name: str,
    capability: tuple[int, int],
    dtype: str,
    windows: WindowGeometry,
    head_dim: int,
) -> dict[str, Any]:
    """Compile one kernel for a GPU, and return the shared memory it takes.

    Does not work in a process with TRITON_INTERPRET=1.

    Returns:
        ``kernel``, ``capability``, ``type``, ``head_dim``, ``shared_bytes`` (taken) and
        ``limit_bytes`` (most that the GPU has for a thread block).
    """
    kernel = getattr(kernels, name)
    tiles = choose_tiles(windows, head_dim, TYPES[dtype], SHARED_MEMORY[capability])
    cut = getattr(tiles, KERNELS[name])
    square = name == "backward_key"
    block = descriptor_block(windows, cut, head_dim, square=square) if cut.tiled else None
    switches = dict(has_bias=True, inside=True, tiled=block is not None)
    options = kernel_constants(windows, cut, head_dim, TYPES[dtype], **switches)
    fixed = {"fixed": options.pop("fixed")}
    described = () if block is None else ("q", "given") if square else ("k", "v")
    signature = {
        argument: f"tensordesc<{dtype}{block}>"
        if argument in described
        else _type(name, argument, dtype)
        for argument in kernel.arg_names
    }
    source = triton.compiler.ASTSource(kernel, signature, fixed)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    found = triton.compile(source, target=target, options=options)
    return {
        "kernel": name,
        "capability": f"{capability[0]}.{capability[1]}",
        "type": dtype,
        "head_dim": head_dim,
        "shared_bytes": found.metadata.shared,
        "limit_bytes": SHARED_MEMORY[capability],
    }


def _type(kernel: str, argument: str, dtype: str) -> Any:
    if argument in _POINTERS:
        return "*fp32" if argument in _FP32_POINTERS else f"*{dtype}"
    integers = {"image": ("i32",) * 5, "grid": ("i32",) * _GRIDS[kernel]}
    strides = (("i32",) * 4,) * _TENSORS[kernel]
    return {**integers, "strides": strides, "scale": "fp32", "fixed": "constexpr"}[argument]


def main() -> None:
    """Compile what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", nargs="+", default=["8.0", "9.0"], help="as 8.6")
    parser.add_argument("--type", nargs="+", choices=TYPES, default=["bf16"])
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--head", type=int, nargs="+", default=[32], help="channels of a head")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--shared", type=int, default=8)
    options = parser.parse_args()
    windows = WindowGeometry(options.window, options.shared)
    for capability, dtype, head, name in itertools.product(
        options.capability, options.type, options.head, options.kernel
    ):
        major, minor = map(int, capability.split("."))
        print(
            json.dumps(compile_halo_kernel(name, (major, minor), dtype, windows, head)), flush=True
        )


if __name__ == "__main__":
    main()
