"""Runs rows of the zoo, each in a process of its own, without importing the libraries each time.

    python benchmarks/memory_server.py < LINES

A line is [ROW, KINDS]; the answer is a line of JSON. The server only imports: it starts no thread
and makes no tensor, so that a process forked from it is as fresh as one that imported by itself,
ten seconds sooner. What a row's process leaves behind goes with it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback

import memory_worker
import torch
import torch._dynamo  # what checkpointing and optimizers import when they first run
from zoo import Row
from zoo_models import ENTRIES

SECONDS_ALLOWED = 400


def import_libraries() -> None:
    """Everything that building and tracing the models imports."""
    for name in ("diffusers", "lowtide.models", "torch._subclasses.fake_tensor"):
        importlib.import_module(name)
    from diffusers import AutoencoderKL, UNet2DModel  # noqa: F401 - they are imported lazily


def answer(line: str) -> dict:
    """What the process of one row prints, or how it failed."""
    values, kinds = json.loads(line)
    row = Row(**values)
    torch.set_num_threads(memory_worker.THREADS)
    figures: dict = {}
    for kind in kinds:
        try:
            figures.update(memory_worker.KINDS[kind](row))
        except Exception:  # noqa: BLE001 - a row that fails is a row
            figures.update(error=traceback.format_exc().strip().splitlines()[-1], failed=kind)
            break
    return figures


def main() -> None:
    """Serve until the input ends."""
    import_libraries()
    assert ENTRIES
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS_ALLOWED)
            os.close(read)
            with os.fdopen(write, "w") as out:
                json.dump(answer(line), out)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            text = said.read()
        _, status = os.waitpid(child, 0)
        if status or not text:
            text = json.dumps({"error": f"the process ended with status {status}"})
        print(text, flush=True)


if __name__ == "__main__":
    main()
