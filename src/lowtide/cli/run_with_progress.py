"""Running a job in a process of its own, with progress."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

from lowtide.cli.progress_bar import ProgressLine
from lowtide.core.heap import tune_heap

R = TypeVar("R")


def run_with_progress(
    load: Callable[[], Callable[..., R]], *given: Any, quiet: bool, **more: Any
) -> R:
    """Return the report of a job that measures its memory, run in this process.

    Args:
        load: Imports the job and returns its function, which is called with the rest.
    """
    progress = ProgressLine(quiet=quiet)
    try:
        tune_heap()  # before the libraries load; no other code shares this process
        run = load()
        gc.freeze()  # keep library objects out of the collection before each measurement
        return run(*given, progress=progress, **more)
    finally:
        progress.close()
