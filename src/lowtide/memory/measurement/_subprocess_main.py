"""Child-process main of `subprocess_run`: runs one target and reports its memory."""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.core.heap import heap_is_tuned, trim_heap
from lowtide.memory.meter import HostMeter
from lowtide.memory.process_memory import allocator_name

_SAMPLE_SECONDS = 0.005


def main() -> None:
    """Run a target, write its memory usage to a file, and exit with its status.

    The arguments are paths of JSON files: of the run, with its ``target``, ``args``, ``imports``
    and ``warmups``, and of the report that receives the usage or the error.
    """
    spec, report = map(Path, sys.argv[1:])
    found, status = _run(json.loads(spec.read_text(encoding="utf-8"))), 0
    if "usage" in found:
        status = found["usage"]["exit_status"]
        try:
            text = json.dumps(found)
        except (TypeError, ValueError) as error:
            text = json.dumps(
                {"kind": "usage", "problem": f"returned a value that is not JSON: {error}"}
            )
    else:
        status, text = 1, json.dumps(found)
    temporary = report.with_suffix(".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(report)
    sys.exit(status)


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    try:
        for name in spec["imports"]:
            importlib.import_module(name)
        call = _callable(spec["target"], spec["args"])
    except (ImportError, AttributeError) as error:
        traceback.print_exc()
        return {"kind": "usage", "problem": f"could not be imported: {error}"}
    try:
        return {"usage": _measure(call, spec["warmups"])}
    except Exception as error:  # noqa: BLE001 - every error goes into the report for the parent
        traceback.print_exc()
        kind = "memory" if _is_memory_error(error) else "error"
        return {"kind": kind, "problem": f"{type(error).__name__}: {error}"}


def _callable(target: str, args: list[Any]) -> Callable[[], Any]:
    sys.argv = [target]
    if ":" in Path(target).name:
        module, _, name = target.rpartition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return functools.partial(found, *args)

    def run_script() -> None:
        sys.argv += args
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")

    return run_script


def _measure(call: Callable[[], Any], warmups: int) -> dict[str, Any]:
    for _ in range(warmups):
        call()
    trim_heap(collect=True)
    allocator, tuned = allocator_name(), heap_is_tuned()
    meter = HostMeter(_SAMPLE_SECONDS)
    meter.start()
    wall, cpu = time.perf_counter(), time.process_time()
    result, status = None, 0
    try:
        result = call()
    except SystemExit as leaving:
        status = _status(leaving)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    usage = meter.lap()
    meter.stop()
    trim_heap(collect=True)
    if heap_is_tuned() and not tuned:
        allocator += ", tuned by the run to keep freed memory"
    return {
        "peak_bytes": usage.corrected_peak_bytes,
        "high_water_bytes": usage.high_water_bytes,
        "retained_bytes": meter.current_bytes,
        "seconds": wall,
        "cpu_seconds": cpu,
        "allocator": allocator,
        "result": result,
        "exit_status": status,
    }


def _status(leaving: SystemExit) -> int:
    """Return the exit status of ``sys.exit(...)`` by Python's own rules."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _is_memory_error(error: Exception) -> bool:
    # Only a run that has imported PyTorch can fail with its errors.
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from lowtide.memory.oom import is_out_of_memory

    return is_out_of_memory(error)
