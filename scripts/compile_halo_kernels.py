"""Compile the halo kernels for cards that are not here.

    python scripts/compile_halo_kernels.py --card 8.6 --type bf16 --window 32 --shared 8

Prints a line of JSON for each kernel, with the shared memory it takes and that the card has. Needs
Triton, but no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json

from lowtide.attention.halo.compile import KERNELS, TYPES, compile_halo_kernel
from lowtide.attention.spatial.window_grid import Windows


def main() -> None:
    """Compile what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", nargs="+", default=["8.0", "9.0"], help="as 8.6")
    parser.add_argument("--type", nargs="+", choices=TYPES, default=["bf16"])
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--head", type=int, nargs="+", default=[32], help="channels of a head")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--shared", type=int, default=8)
    options = parser.parse_args()
    windows = Windows(options.window, options.shared)
    for card, dtype, head, name in itertools.product(
        options.card, options.type, options.head, options.kernel
    ):
        major, minor = map(int, card.split("."))
        print(
            json.dumps(compile_halo_kernel(name, (major, minor), dtype, windows, head)), flush=True
        )


if __name__ == "__main__":
    main()
