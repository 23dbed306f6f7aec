"""Measurement of a new model in a process of its own, for jobs with a small budget.

A probe leaves compiled kernels and a fragmented heap in its process: 40 MiB where the run itself
takes 30.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.core.errors import LowtideError
from lowtide.core.heap import heap_is_tuned, tune_heap
from lowtide.core.progress import Cancel, ProgressCallback, check_cancel, report_phase
from lowtide.core.units import MIB
from lowtide.memory.library_memory import room_for_process

if TYPE_CHECKING:
    from lowtide.jobs.image_job import ImageJob
    from lowtide.jobs.image_settings import ImageSettings
    from lowtide.media.discover import FilePair
    from lowtide.memory.budget import Budget

# Budgets below which starting a process is worth what it keeps free. It takes 2 seconds.
_CHILD_BELOW = 512 * MIB
_POLL_SECONDS = 0.1


def measure_in_child(
    job_type: type[ImageJob],
    settings: ImageSettings,
    pair: FilePair,
    budget: Budget,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
) -> bool:
    """Measure a model on the CPU in a new process, and plan its first image there.

    That process stores what it finds for this one. Nothing is done for a budget so large that what
    a probe leaves is little of it, and in a container that holds no second process like this one.

    Returns:
        Whether costs may have been stored. A model that fails there fails here with its reason.

    Raises:
        Cancelled: ``cancel`` was set.
    """
    if budget.device != "cpu" or budget.device_bytes >= _CHILD_BELOW:
        return False
    if not room_for_process(budget.device_bytes):
        return False
    import torch

    report_phase(progress, "probe", settings.model_name)
    order = {
        "job": f"{job_type.__module__}:{job_type.__name__}",
        "settings": settings.to_json(),
        "source": str(pair.source),
        "target": str(pair.target),
        "budget": asdict(budget),
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
    """Read an order from standard input, measure its model and plan its image."""
    order = json.load(sys.stdin)
    if order["tuned_heap"]:
        tune_heap()  # takes effect only before the libraries load
    import torch

    from lowtide.jobs.item import Item
    from lowtide.jobs.prepare import prepare
    from lowtide.memory.budget import Budget

    torch.set_num_threads(order["threads"])
    module, _, name = order["job"].partition(":")
    job_type = getattr(importlib.import_module(module), name)
    settings = job_type.settings_type.from_json(order["settings"])
    budget = Budget(**order["budget"])
    job_type.load_libraries(settings)
    limit = budget.device_bytes // 2
    prepared = prepare(settings, device="cpu", limit_bytes=limit, runs_job=False)
    with contextlib.suppress(LowtideError):  # the job says what is wrong with its image
        item = Item(Path(order["source"]), Path(order["target"]))
        job_type(prepared, settings, budget).plan(item)


if __name__ == "__main__":
    main()
