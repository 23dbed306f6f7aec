"""Measurement of a new model in a process of its own, for jobs with a small budget.

A probe leaves compiled kernels and a fragmented heap in its process: 40 MiB where the run itself
takes 30.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from lowtide.core.heap import heap_is_tuned, tune_heap
from lowtide.core.progress import Cancel, check_cancel
from lowtide.core.units import MIB

if TYPE_CHECKING:
    from lowtide.jobs.image_settings import ImageSettings

# Limits of a probe below which starting a process is worth what it keeps free. It takes 2 seconds.
_APART_BELOW = 256 * MIB
_POLL_SECONDS = 0.1


def measure_apart(settings: ImageSettings, limit_bytes: int | None, cancel: Cancel = None) -> bool:
    """Measure a model on the CPU in a new process, which stores its costs, for a small budget.

    Returns:
        Whether costs may have been stored. A model that fails there fails here with its reason.

    Raises:
        Cancelled: ``cancel`` was set.
    """
    if limit_bytes is None or limit_bytes >= _APART_BELOW:
        return False
    import torch

    order = {
        "settings": [f"{type(settings).__module__}:{type(settings).__name__}", settings.to_json()],
        "limit_bytes": limit_bytes,
        "tuned_heap": heap_is_tuned(),
        "threads": torch.get_num_threads(),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "lowtide.jobs.measure_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    words: bytes | None = json.dumps(order).encode()
    try:
        while True:
            try:
                child.communicate(words, timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                words = None
                check_cancel(cancel)
            else:
                return child.returncode == 0
    finally:
        child.kill()
        child.wait()


def main() -> None:
    """Read an order from standard input, and measure its model."""
    order = json.load(sys.stdin)
    if order["tuned_heap"]:
        tune_heap()  # takes effect only before the libraries load
    import importlib

    import torch

    from lowtide.jobs.prepare import preload_libraries, prepare

    torch.set_num_threads(order["threads"])
    home, values = order["settings"]
    module, _, name = home.partition(":")
    settings = getattr(importlib.import_module(module), name).from_json(values)
    preload_libraries(settings)
    prepare(settings, device="cpu", limit_bytes=order["limit_bytes"], runs_job=False)


if __name__ == "__main__":
    main()
