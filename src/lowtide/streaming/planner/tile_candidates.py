"""Candidate plans of the strategies `whole` and `tiled`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lowtide.core.errors import UsageError
from lowtide.memory.costs import ModelCosts
from lowtide.memory.plan import LedgerRow, Plan, Strategy, TiledStrategy, WholeStrategy
from lowtide.streaming.planner.ledger_rows import (
    EQUALLY_FAST,
    ROW_BUFFERS,
    activation_row,
    calibrate_margin,
    run_ledger,
    with_heap_modes,
)
from lowtide.streaming.planner.model_facts import (
    ImageTask,
    ModelGeometry,
    PlanOverrides,
    plan_fields,
)
from lowtide.streaming.tiles.grid import (
    TileAxis,
    min_tile,
    round_up,
    smallest_equal_tile,
    split_axis,
    tile_count,
)

_SIDES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Widths of a tile, in its heights.
_WIDTHS = (1, 2, 4, 8)
_BATCHES = (1, 2, 4, 8, 16)
# Overlap and blend width for models with an unbounded receptive field: more overlap hardly helps,
# with none seams show.
_DEFAULT_OVERLAP, _DEFAULT_BLEND = 32, 16
_BLOCK_ROWS = 16
_AMPLE_PIXELS = 240 * 240
# Overhead of a tile in seconds: slicing, merging, and Python between them.
_TILE_SECONDS = 1e-3


def tile_candidates(
    costs: ModelCosts, geometry: ModelGeometry, image_task: ImageTask, overrides: PlanOverrides
) -> list[Plan]:
    """Return every whole and tiled plan worth pricing; the whole alone where tiles are unknown.

    Raises `UsageError` for overrides that contradict each other.
    """
    require_valid_overrides(geometry, overrides)
    overlap, blend = _overlap(costs, overrides)
    if overrides.batch is not None and overrides.batch > 1 and not costs.batchable:
        raise UsageError(
            f"a tile batch size of {overrides.batch} is not possible: this model mixes the images"
            " of a batch",
            hint="--tile-batch-size 1",
        )
    if not geometry.tileable or costs.only_whole:
        overrides = replace(overrides, strategy="whole")
    plans = []
    if overrides.strategy in ("auto", "tiled"):
        # On the CPU a batch gains nothing over a larger tile, and its last partial batch fragments
        # the heap.
        several = costs.batchable and costs.device != "cpu"
        batches = (overrides.batch,) if overrides.batch else _BATCHES if several else (1,)
        for tile in _tiles(geometry, image_task, overrides, overlap):
            columns = tile_count(image_task.padded_size[1], tile[1], overlap, geometry.align)
            # A batch stays within one row of tiles, so a larger one would never be full.
            plans += [
                _plan(costs, geometry, image_task, overlap, tile, batch, blend)
                for batch in dict.fromkeys(min(batch, columns) for batch in batches)
            ]
        if overrides.batch and plans:
            fullest = max(plan.strategy.batch for plan in plans)
            plans = [plan for plan in plans if plan.strategy.batch == fullest]
    plans = _drop_small_tiles(
        _drop_high_tiles(plans, image_task.row_buffer_bytes), image_task.ample_bytes
    )
    # An image smaller than any tile is one tile.
    if not plans or (overrides.strategy == "auto" and not overrides.requires_tiles):
        plans.insert(0, _plan(costs, geometry, image_task, overlap))
    return with_heap_modes(plans, image_task.tiled_bounds)


def require_valid_overrides(geometry: ModelGeometry, overrides: PlanOverrides) -> None:
    """Raise `UsageError` for overrides that are known to contradict the model or each other.

    Nothing has to be measured for that.
    """
    if not geometry.tileable and (overrides.strategy == "tiled" or overrides.requires_tiles):
        raise UsageError(
            "this model needs the whole image at once, not tiles", hint="--strategy whole"
        )
    if overrides.hann_blend and overrides.overlap == 0:
        raise UsageError("blending needs an overlap", hint="--tile-overlap 16")
    _least_tile(geometry, overrides, overrides.overlap or 0)


def _least_tile(geometry: ModelGeometry, overrides: PlanOverrides, overlap: int) -> int:
    """Return the least side of a tile; raise `UsageError` if the one asked for is smaller."""
    least = max(min_tile(overlap, geometry.align), geometry.minimum, 2 * geometry.align)
    if overrides.tile is not None and overrides.tile < least:
        beside = f" with an overlap of {overlap}" if overlap else ""
        raise UsageError(
            f"--tile {overrides.tile} is too small for this model{beside}",
            hint=f"--tile {least} or more",
        )
    return least


def _drop_high_tiles(plans: list[Plan], limit: int | None) -> list[Plan]:
    """Drop tiles so high that their row buffer takes a large share of the limit.

    For a wide image, these rows are the one use of memory that grows with the image. Lower, wider
    tiles keep them small, so that the rest of the budget serves every image alike.
    """
    rows = {
        index: sum(row.upper for row in plan.ledger if row.name in ROW_BUFFERS)
        for index, plan in enumerate(plans)
        if plan.strategy.tiles > 1
    }
    if limit is None or not rows:
        return plans
    allowed = max(limit, min(rows.values()))
    return [plan for index, plan in enumerate(plans) if rows.get(index, 0) <= allowed]


def _drop_small_tiles(plans: list[Plan], easy_bytes: int | None) -> list[Plan]:
    """Drop small tiles where larger ones are as fast and fit the budget easily.

    With small tiles, the least thing that grows with the image would show in the peak.
    """
    ample = [plan for plan in plans if not _is_small(plan.strategy)]
    easy = [
        plan for plan in ample if plan.strategy.tiles > 1 and plan.upper_bytes <= (easy_bytes or 0)
    ]
    small = min((plan.seconds for plan in plans if plan not in ample), default=math.inf)
    return ample if any(plan.seconds <= small * EQUALLY_FAST for plan in easy) else plans


def _is_small(strategy: Strategy) -> bool:
    return (
        isinstance(strategy, TiledStrategy)
        and strategy.tiles > 1
        and strategy.run_pixels < _AMPLE_PIXELS
    )


def _overlap(costs: ModelCosts, overrides: PlanOverrides) -> tuple[int, int]:
    """Return (overlap, ramp width): the halo on both sides of a cut, and the ramp."""
    needed = None if costs.receptive_field is None else 2 * costs.receptive_field
    wanted = overrides.hann_blend if overrides.hann_blend is not None else needed is None
    if overrides.overlap is not None:
        overlap = overrides.overlap
        spare = overlap if needed is None else max(overlap - needed, overlap // 2)
        return overlap, min(spare, overlap, _DEFAULT_BLEND) if wanted else 0
    if needed is None:
        return _DEFAULT_OVERLAP, _DEFAULT_BLEND if wanted else 0
    return (needed + _DEFAULT_BLEND, _DEFAULT_BLEND) if wanted else (needed, 0)


def _tiles(
    geometry: ModelGeometry, image_task: ImageTask, overrides: PlanOverrides, overlap: int
) -> Iterator[tuple[int, int]]:
    """Yield (height, width) of tiles to price, on the grid, smaller than the image."""
    floor = _least_tile(geometry, overrides, overlap)
    height, width = image_task.padded_size
    if overrides.tile is not None:
        side = round_up(overrides.tile, geometry.align)
        yield (side, side) if geometry.square else (min(side, height), min(side, width))
        return
    sides = sorted({round_up(max(side, floor), geometry.align) for side in _SIDES})
    if geometry.square:
        yield from ((side, side) for side in sides if (side, side) != image_task.padded_size)
        return
    shapes = {(min(side, height), min(side * wide, width)): 0 for side in sides for wide in _WIDTHS}
    seen = {image_task.padded_size}
    for rows, columns in shapes:
        tile = (
            smallest_equal_tile(height, rows, overlap, geometry.align, floor),
            smallest_equal_tile(width, columns, overlap, geometry.align, floor),
        )
        if tile not in seen:
            seen.add(tile)
            yield tile


def _plan(
    costs: ModelCosts,
    geometry: ModelGeometry,
    image_task: ImageTask,
    overlap: int,
    tile: tuple[int, int] | None = None,
    batch: int = 1,
    blend: int = 0,
) -> Plan:
    """Return the plan for tiles of (height, width) ``tile``, or for the whole image."""
    size = image_task.padded_size
    axes = [
        split_axis(length, side, overlap, align=geometry.align, blend=blend)
        for length, side in zip(size, tile or size, strict=True)
    ]
    rows, columns = axes
    context = min(rows.context, columns.context)
    single = len(rows.starts) == len(columns.starts) == 1
    exact = single or (costs.receptive_field is not None and context >= costs.receptive_field)
    images = image_task.inputs
    pixels = math.prod([round_up(axis.tile, geometry.align) for axis in axes]) * images
    at_once = pixels * batch
    if not exact:
        # The error is measured with more context than the tiles have; that run must fit too.
        at_once = max(at_once, images * _reference_pixels(rows, columns, geometry.align))
    strategy = WholeStrategy(overlap=overlap)
    if costs.only_whole:  # no overlap is known that parts would need
        strategy = WholeStrategy(recovery=("retry", "smaller plan"))
    if tile is not None:
        strategy = TiledStrategy(
            tile_width=columns.tile,
            tile_height=rows.tile,
            overlap=overlap,
            blend=blend,
            batch=batch,
            tiles=len(rows.starts) * len(columns.starts),
            run_pixels=at_once,
            seam_share=0.0 if exact else 1 - _inner(rows, overlap) * _inner(columns, overlap),
        )
    return Plan(
        **plan_fields(costs, geometry, image_task),
        strategy=strategy,
        accuracy="exact" if exact else "bounded",
        seconds=_seconds(costs, rows, columns, pixels, batch),
        ledger=calibrate_margin(
            tuple(_ledger(costs, image_task, rows, columns, at_once, geometry.scale)),
            image_task.tiled_bounds.current_heap,
            costs.device,
        ),
    )


def _reference_pixels(rows: TileAxis, columns: TileAxis, align: int) -> int:
    """Return the pixels of the largest tile, extended as for the error measurement.

    Extended by an eighth of its side on every side, at least one grid step, within the image.
    """
    return math.prod(round_up(_widest(axis, align), align) for axis in (rows, columns))


def _widest(axis: TileAxis, align: int) -> int:
    margin = max(align, axis.tile // 8 // align * align)
    return max(
        min(axis.length, start + axis.tile + margin) - max(0, start - margin)
        for start in axis.starts
    )


def _inner(axis: TileAxis, overlap: int) -> float:
    """Return the share of an axis that lies outside every overlap."""
    return max(0.0, 1 - (len(axis.starts) - 1) * overlap / axis.length)


def _seconds(
    costs: ModelCosts, rows: TileAxis, columns: TileAxis, pixels: int, batch: int
) -> float:
    full, rest = divmod(len(columns.starts), batch)
    row = full * costs.seconds(pixels * batch) + (costs.seconds(pixels * rest) if rest else 0)
    return len(rows.starts) * (row + costs.time_scale * _TILE_SECONDS * len(columns.starts))


def _ledger(
    costs: ModelCosts,
    image_task: ImageTask,
    rows: TileAxis,
    columns: TileAxis,
    pixels: int,
    scale: int,
) -> Iterable[LedgerRow]:
    (_, width, channels), blended = image_task.shape, rows.blended or columns.blended
    pixel = channels * image_task.item_bytes
    spans = map(rows.span, range(len(rows.starts)))
    tallest = max([high - low for low, high in spans]) * scale
    out_row = width * scale * (4 * channels if blended else pixel)
    row_in = columns.length * pixel
    return run_ledger(
        costs,
        image_task,
        activation_row(costs, pixels),
        # A batch in float32 to the device, and its result back.
        staged_bytes=4 * pixels * (channels + channels * scale**2),
        row_bytes=(row_in * (rows.tile + _BLOCK_ROWS), out_row * (tallest + blended * _BLOCK_ROWS)),
    )
