"""Variants of whole and tiled plans: compiled, as CUDA graphs, prefetching, on several devices."""

from __future__ import annotations

from dataclasses import replace

from lowtide.core.units import MIB
from lowtide.memory.plan import Plan, TiledStrategy
from lowtide.streaming.planner.ledger_rows import LIVE_ROW, ledger_row
from lowtide.streaming.tiles.grid import tile_axes

# Light networks took a quarter of a minute and 70 MiB (benchmarks/results/compiled.json), larger
# ones take more.
_COMPILE_SECONDS, _COMPILER_BYTES, _COMPILER_UPPER = 30.0, 150 * MIB, 1.5
# A CUDA graph keeps the memory of a run, allocator overhead included, in a private pool. In
# addition there are the eager run that it is compared with, and tiles of other shapes. Blocks are
# rounded up.
_POOL_UPPER = 1.3
# Three warm-up runs, the capture and the comparison.
_CAPTURE_RUNS = 6


def with_compile(plan: Plan, images: int) -> Plan:
    """Return ``plan`` with a compiled network.

    ``images`` of one size share the compile time.
    """
    upper = _COMPILER_BYTES * _COMPILER_UPPER
    row = ledger_row("compiler", "host", _COMPILER_BYTES, upper, "prior")
    seconds = plan.seconds + _COMPILE_SECONDS / images
    return plan.model_copy(
        update={"compiled": True, "seconds": seconds, "ledger": (*plan.ledger, row)}
    )


def with_cuda_graph(plan: Plan, images: int) -> Plan:
    """Return ``plan`` with its network replayed as a CUDA graph.

    ``images`` of one size share the capture time.
    """
    taken = sum(one.value for one in plan.ledger if one.name in (LIVE_ROW, "allocator"))
    row = ledger_row("CUDA graph", "device", taken, taken * _POOL_UPPER, "prior")
    passes = plan.strategy.tiles / plan.strategy.batch
    seconds = plan.seconds * (1 + _CAPTURE_RUNS / passes / images)
    return plan.model_copy(
        update={"cuda_graph": True, "seconds": seconds, "ledger": (*plan.ledger, row)}
    )


# Ledger rows that each device, or each process's share of a CPU, has for itself.
_CPU_ROWS_PER_DEVICE = {"live activations and workspace", "allocator", "margin"}
_GPU_ROWS_PER_DEVICE = {"copy buffers"}


def with_devices(plan: Plan, devices: int) -> Plan:
    """Return ``plan`` with the tiles of a row spread over up to ``devices`` devices.

    Unchanged if there is one device. Each GPU has its own memory; parts of a CPU share memory, and
    each has its own buffers.
    """
    tiles = plan.strategy
    if not isinstance(tiles, TiledStrategy):
        return plan
    _, columns = tile_axes(plan.image, tiles)
    groups = -(-len(columns.starts) // tiles.batch)
    used = min(devices, groups)
    if used < 2:
        return plan
    repeated = _CPU_ROWS_PER_DEVICE if plan.device == "cpu" else _GPU_ROWS_PER_DEVICE
    rows = tuple(
        replace(row, value=row.value * used, upper=row.upper * used)
        if row.name in repeated
        else row
        for row in plan.ledger
    )
    share = -(-groups // used) / groups
    plan = plan.with_strategy(device_count=used)
    return plan.model_copy(update={"ledger": rows, "seconds": plan.seconds * share})


def with_prefetch(plan: Plan, streams: int) -> Plan:
    """Return ``plan`` with up to ``streams`` batches of tiles in flight.

    In flight: copied to the GPU or back. Unchanged on the CPU, which shares the host's memory, and
    where there is one batch. Each batch has its own float32 buffers on host and GPU; the network's
    activations count once, since a GPU runs batches one after another.
    """
    tiles = plan.strategy
    if plan.device == "cpu" or not isinstance(tiles, TiledStrategy):
        return plan
    rows, columns = tile_axes(plan.image, tiles)
    most = min(streams, len(rows.starts) * -(-len(columns.starts) // tiles.batch))
    if most < 2:
        return plan
    ledger = []
    for one in plan.ledger:
        if one.name == "copy buffers":
            # In addition to what is in flight, images are held in float32 and in the file's dtype.
            given = one.value // (1 + plan.image.scale**2) * 5 // 4
            extra = (most - 1) * one.value
            value, upper = most * (one.value + given), most * (one.upper + given)
            one = replace(one, value=value, upper=upper)
            ledger.append(ledger_row("tiles in flight", "device", extra, extra, "known"))
        ledger.append(one)
    return plan.with_strategy(in_flight=most).model_copy(update={"ledger": tuple(ledger)})
