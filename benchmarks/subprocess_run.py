"""A function run in a fresh process, and the memory that it adds there.

The child has this process's ``sys.path`` and working folder. On Linux with glibc its heap returns
every block of 64 KiB or more when it is freed, so that resident memory follows what is allocated.
That costs time: about half as much more, for networks of windows several times as much.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.core.heap import heap_is_tuned, trim_heap
from lowtide.core.python_child import start_python
from lowtide.memory.meter import HostMemoryMeter

_HEAP_RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536"} if sys.platform == "linux" else {}
_SAMPLE_SECONDS = 0.005


@dataclass(frozen=True)
class SubprocessUsage:
    """Memory of a run, in bytes above its imports and warmups, and what the function returned.

    ``peak_bytes`` is that of anonymous resident memory, ``high_water_bytes`` of all resident pages,
    library code that was touched for the first time included (None where the kernel keeps no such
    mark), and ``retained_bytes`` what was left. The figures depend on the heap: ``allocator``.
    """

    result: Any
    peak_bytes: int
    high_water_bytes: int | None
    retained_bytes: int
    allocator: str


def measure_in_subprocess(
    target: str,
    *args: Any,
    env: Mapping[str, str | None] | None = None,
    imports: Sequence[str] = (),
    warmups: int = 0,
) -> SubprocessUsage:
    """Run ``target``, a ``"module:function"``, in a fresh process and measure the memory it adds.

    Args:
        target: The function.
        args: Its arguments, which like its result must be JSON values.
        env: Added to the environment; a variable that is None is removed from it.
        imports: Modules imported before the baseline, in addition to the function's.
        warmups: Calls of the function before the baseline, for what a process pays only once
            (generated kernels, stacks of threads, late imports).
    """
    variables = {**os.environ, **_HEAP_RETURNS, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        report = Path(folder) / "report.json"
        order = json.dumps([target, args, list(imports), warmups])
        child = start_python(
            "subprocess_run:main",
            *(order, str(report)),
            env={name: value for name, value in variables.items() if value is not None},
        )
        try:
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        if status:
            raise RuntimeError(f"{target} ended with status {status}")
        return SubprocessUsage(**json.loads(report.read_text()))


def main() -> None:
    """Run a function in this process and write what it took into a file."""
    order, report = sys.argv[1:]
    target, args, imports, warmups = json.loads(order)
    for name in imports:
        importlib.import_module(name)
    module, _, name = target.partition(":")
    function = functools.partial(getattr(importlib.import_module(module), name), *args)
    for _ in range(warmups):
        function()
    trim_heap(collect=True)
    allocator, tuned = _allocator(), heap_is_tuned()
    meter = HostMemoryMeter(_SAMPLE_SECONDS)
    meter.start()
    result = function()
    usage = meter.lap()
    meter.stop()
    trim_heap(collect=True)
    if heap_is_tuned() and not tuned:
        allocator += ", tuned by the run to keep freed memory"
    found = {
        "result": result,
        "peak_bytes": usage.corrected_peak_bytes,
        "high_water_bytes": usage.high_water_bytes,
        "retained_bytes": meter.retained_bytes,
        "allocator": allocator,
    }
    Path(report).write_text(json.dumps(found))


def _allocator() -> str:
    """Name of this process's heap, with its version and its setting."""
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}):
        return f"C library of {sys.platform}"
    setting = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    library = os.confstr("CS_GNU_LIBC_VERSION")
    return f"{library}, MALLOC_MMAP_THRESHOLD_={setting}" if setting else str(library)
