"""Memory of Lowtide's libraries, where a limit on this process leaves little.

A process that loads more than its container may hold is killed, and ``ulimit`` makes some import
fail. So what the libraries take is measured in a process of its own, once on a machine, and what
planning imports later is asked for before.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.metadata import version
from typing import Any

from lowtide.core.errors import BudgetError
from lowtide.core.python_child import start_python
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.oom import NO_MEMORY_WORDS
from lowtide.memory.plan_store import JsonCache
from lowtide.memory.process_memory import Counted, MemoryLimit, memory_limits, status_bytes

_FIELDS: dict[str, Counted] = {"RssAnon": "resident", "VmData": "data", "VmSize": "addresses"}
# Bytes above which the libraries fit in any case, and a process is not worth its 2 seconds.
_AMPLE: dict[Counted, int] = {"resident": 768 * MIB, "data": 1536 * MIB, "addresses": 8192 * MIB}
# Memory of modules that tracing and capturing networks import, of all that is private and of
# addresses: 83 to 101 MiB and 210 to 290 MiB with PyTorch 2.8 and 2.15.
_PLANNING = {"torch._dynamo": (88 * MIB, 272 * MIB), "torch.export._trace": (24 * MIB, 32 * MIB)}
# Stacks of the threads that read, write and measure, and an encoder's rows: only addresses mostly.
_STACKS: dict[Counted, int] = {"resident": 0, "data": 96 * MIB, "addresses": 96 * MIB}
# The smallest budgets that bundled models run in are 21 to 29 MiB.
_LEAST_BUDGET = 32 * MIB
# What processes that do the same differ by.
_NOISE_BYTES = 8 * MIB
_MAIN = "lowtide.memory.library_memory:main"
# Processor seconds after which an import does not end any more: where memory runs out, OpenBLAS
# asks for it again and again. It takes 5 to 10.
_MOST_SECONDS = 60


def require_room_for_libraries(*modules: str) -> None:
    """Raise `BudgetError` if a limit leaves too little to import ``modules`` and run anything.

    Where a limit is low, and nothing is known about the libraries that they import, a process of
    its own loads them. Nothing is asked once PyTorch is loaded, beside which that has no room.
    """
    if "torch" in sys.modules:
        return
    tight = [one for one in memory_limits() if one.free_bytes < _AMPLE[one.counts]]
    if not tight:
        return
    sizes = _known_sizes(modules)
    lowest = min(tight, key=lambda one: one.free_bytes / _AMPLE[one.counts])
    if sizes is None:
        raise BudgetError(
            f"the libraries of Lowtide do not fit in {lowest}",
            hint=f"raise that limit: {format_bytes(_AMPLE[lowest.counts])} is ample",
        )
    for limit in tight:
        needed = sizes[limit.counts] + _LEAST_BUDGET + _STACKS[limit.counts]
        missing = needed - _used_bytes(limit.counts) - limit.free_bytes
        if missing > 0:
            raise BudgetError(
                f"the libraries of Lowtide take {format_bytes(sizes[limit.counts])}, and a run"
                f" {format_bytes(needed - sizes[limit.counts])} more: too much for {limit}",
                hint=f"raise that limit to {enough(limit.limit_bytes + missing)}",
            )


def budget_room(limit: MemoryLimit) -> int:
    """Return the most bytes of a budget under ``limit``: what other parts of a run leave.

    These are stacks, and what planning is going to import if at least a small budget remains.
    """
    room = limit.free_bytes - _STACKS[limit.counts]
    planned = room - _planning_bytes(limit.counts)
    return planned if planned >= _LEAST_BUDGET else room


def bytes_beside_budget(limit: MemoryLimit) -> int:
    """Return the bytes of ``limit`` that no budget gets: what is used, stacks and planning."""
    used = limit.limit_bytes - limit.free_bytes
    return used + _STACKS[limit.counts] + _planning_bytes(limit.counts)


def enough(limit_bytes: int) -> str:
    """Return a limit in words that is not below ``limit_bytes``, nor too low for another try."""
    return f"{-(-(limit_bytes + _NOISE_BYTES) // MIB)} MiB"


def reason_not_to_plan() -> str | None:
    """Return why networks can be neither traced nor captured here: a limit. None if they can."""
    short = _short_of_planning()
    return None if short is None else _planning_reason(short[0])


def require_room_to_plan(what: str) -> None:
    """Raise `BudgetError` if a limit leaves too little for what ``what`` imports."""
    if (short := _short_of_planning()) is None:
        return
    limit, missing = short
    raise BudgetError(
        f"{what} is not possible: {_planning_reason(limit)}",
        hint=f"raise that limit to {enough(limit.limit_bytes + missing)}, or run a bundled"
        " model, of which all is known",
    )


def _short_of_planning() -> tuple[MemoryLimit, int] | None:
    """Return a limit that leaves too little for what planning imports, and the missing bytes."""
    for limit in memory_limits() if _planning_bytes("resident") else ():
        needed = _planning_bytes(limit.counts) + _STACKS[limit.counts] + _LEAST_BUDGET
        if limit.free_bytes < needed:
            return limit, needed - limit.free_bytes
    return None


def _planning_reason(limit: MemoryLimit) -> str:
    needed = format_bytes(_planning_bytes(limit.counts))
    left = format_bytes(limit.free_bytes)
    return f"the libraries for it take {needed}, and of {limit} {left} is left"


def room_for_processes(count: int = 1) -> int:
    """Return bytes that the container leaves each of ``count`` more processes like this one.

    Beside what this one holds, and what planning imports there.
    """
    needed = _used_bytes("resident") + _planning_bytes("resident")
    groups = [one for one in memory_limits() if one.counts == "resident"]
    return min((one.free_bytes // count - needed for one in groups), default=sys.maxsize)


def require_room_for_processes(count: int) -> None:
    """Raise `BudgetError` if a container does not hold ``count`` more processes like this one."""
    missing = count * (_LEAST_BUDGET - room_for_processes(count))
    if missing > 0:
        groups = [one for one in memory_limits() if one.counts == "resident"]
        tightest = min(groups, key=lambda one: one.free_bytes)
        each, limit = format_bytes(_used_bytes("resident")), tightest.limit_bytes + missing
        raise BudgetError(
            f"{count} processes that take {each} each for libraries and the model are too much"
            f" for {tightest}",
            hint=f"fewer --devices, or raise that limit to {enough(limit)}",
        )


def _planning_bytes(counts: Counted) -> int:
    """Return bytes of the modules for planning that this process has not imported yet."""
    missing = [sizes for name, sizes in _PLANNING.items() if name not in sys.modules]
    return sum(addresses if counts == "addresses" else private for private, addresses in missing)


def _used_bytes(counts: Counted) -> int:
    return _sizes()[counts]


def _sizes() -> dict[Counted, int]:
    return {counts: status_bytes(name) for name, counts in _FIELDS.items()}


def _known_sizes(modules: tuple[str, ...]) -> dict[Counted, int] | None:
    """Return the memory of a process that has imported ``modules``; None if it got too little."""
    facts = modules, version("torch"), sys.version, sys.prefix
    known = JsonCache().get("libraries", *facts)
    if known is not None:
        return known
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_python(_MAIN, str(_MOST_SECONDS), *modules, **pipes, text=True) as child:
        try:
            said, errors = child.communicate()
        except BaseException:
            child.kill()
            raise
    if child.returncode == 0:
        known = json.loads(said)
        JsonCache().put("libraries", *facts, value=known)
        return known
    if child.returncode < 0 or any(words in errors for words in NO_MEMORY_WORDS):
        return None
    return dict.fromkeys(_FIELDS.values(), 0)  # another fault, which this process shows too


def main() -> None:
    """Import modules within some seconds of the processor, and print the memory of this process."""
    import resource  # not on Windows, where nothing has limits

    seconds, *modules = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    for module in modules:
        importlib.import_module(module)
    sys.stdout.write(json.dumps(_sizes()))
