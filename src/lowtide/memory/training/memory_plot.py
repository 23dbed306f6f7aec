"""Plot of a run's memory: bytes alive at each operator, by kind, and the budget."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.core.errors import UsageError
from lowtide.core.figure_file import new_figure, require_figure_name, save_figure
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.allocator import SimulatedAllocator
from lowtide.memory.prediction.estimate import Estimate
from lowtide.memory.tracing.trace import KIND_TITLES, Kind, MemoryTrace, StorageEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS = 4000
# Okabe and Ito's colorblind-safe palette, darkest at the bottom of the stack.
_COLORS: dict[Kind, str] = {
    "weights": "#0072b2",
    "optimizer": "#56b4e9",
    "gradients": "#009e73",
    "inputs": "#cc79a7",
    "activations": "#e69f00",
}
_CONTEXT_COLOR, _BUDGET_COLOR, _LINE_COLOR = "#bdbdbd", "#d55e00", "#333333"
# Shares of the figure's width: a letter of a name, and the least room for a vertical name.
_CHARACTER_WIDTH, _MIN_LABEL_WIDTH = 0.0105, 0.018
# Letters of a title's line that fit above the plot.
_TITLE_WIDTH = 90


def memory_curve(
    trace: MemoryTrace, points: int = _MAX_POINTS
) -> list[tuple[int, dict[Kind, int]]]:
    """Return (operator, bytes of each kind) at ``points`` events of a run or fewer.

    Events are divided into equal buckets; of each, the highest point is kept, so that the peak is
    there.
    """
    bucket = -(-(len(trace.events) + 1) // points)
    numbered = enumerate((op, dict(now)) for op, now in trace.live_by_kind())
    return [
        max((point for _, point in group), key=lambda point: sum(point[1].values()))
        for _, group in itertools.groupby(numbered, key=lambda at: at[0] // bucket)
    ]


def plot_memory(
    estimate: Estimate,
    path: str | Path,
    *,
    budget_bytes: int,
    title: str,
    replace: bool = False,
) -> None:
    """Plot the memory of a traced run, by operator and kind, to a file that matplotlib writes.

    Areas are bytes that tensors hold, exact, on top of the CUDA context. What the allocator would
    have reserved for them is a line above; the expected peak and its upper bound, which count
    workspace too, are horizontal lines, and so is the budget.

    Raises:
        UsageError: for another suffix, for an estimate that was not traced, and where matplotlib is
            not installed.
        OutputError: if the file cannot be written.
    """
    path = Path(path)
    require_figure_name(path)
    trace = estimate.trace
    if trace is None:
        raise UsageError("this estimate was not traced: it has no memory over time to plot")
    figure = new_figure(10, 5.2)
    axes = figure.add_subplot()
    context = sum(row.value for row in estimate.ledger if row.name == "context")
    peak = _draw_areas(axes, trace, context)
    if context:
        _draw_reserved(axes, trace, context)
    for name, size, style in (
        ("expected peak", estimate.predicted_bytes, "--"),
        ("upper bound", estimate.upper_bytes, ":"),
        ("budget", budget_bytes, "-"),
    ):
        color, width = (_BUDGET_COLOR, 2) if name == "budget" else (_LINE_COLOR, 1)
        label = f"{name} {format_bytes(size)}"
        axes.axhline(size / MIB, color=color, linewidth=width, linestyle=style, label=label)
    axes.set_ylim(0, max(peak, estimate.upper_bytes, budget_bytes) / MIB * 1.16)
    axes.set_xlim(0, max(len(trace.ops), 1))
    _draw_phases(axes, trace)
    axes.set_title(textwrap.fill(title, _TITLE_WIDTH), loc="left", fontsize=11)
    axes.set_xlabel("operator")
    axes.set_ylabel("MiB")
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    # The highest area of the stack comes first.
    axes.legend(
        frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True
    )
    save_figure(figure, path, replace=replace)


def _draw_areas(axes: Axes, trace: MemoryTrace, context: int) -> int:
    """Draw stacked areas of the kinds present and a dot at their peak; return its bytes."""
    curve = memory_curve(trace)
    ops = [op for op, _ in curve]
    bands = {"CUDA context": (_CONTEXT_COLOR, [context / MIB] * len(curve))}
    for kind, color in _COLORS.items():
        bands[KIND_TITLES[kind]] = color, [now[kind] / MIB for _, now in curve]
    bands = {title: band for title, band in bands.items() if any(band[1])}
    axes.stackplot(
        ops,
        [sizes for _, sizes in bands.values()],
        colors=[color for color, _ in bands.values()],
        labels=list(bands),
        step="post",
        linewidth=0,
    )
    op, now = max(curve, key=lambda point: sum(point[1].values()))
    size = sum(now.values())
    name = trace.ops[op].name.partition(".")[0] if op < len(trace.ops) else "end"
    label = f"peak of tensors {format_bytes(size)},\nat {name}"
    axes.plot([op], [(size + context) / MIB], "o", color=_LINE_COLOR, markersize=5, label=label)
    return size + context


def _draw_reserved(axes: Axes, trace: MemoryTrace, context: int) -> None:
    """Draw what the caching allocator reserves, which does not shrink as tensors are freed."""
    allocator, handles = SimulatedAllocator(), {}
    ops, sizes = [0], [0.0]
    initial = (StorageEvent(0, storage, size) for storage, size in trace.initial.items())
    for op, storage, size in itertools.chain(initial, trace.events):
        if size > 0:
            handles[storage] = allocator.allocate(size)
        elif storage in handles:
            allocator.free(handles.pop(storage))
        now = (allocator.reserved + context) / MIB
        if now != sizes[-1]:
            ops.append(op)
            sizes.append(now)
    axes.step(
        [*ops, len(trace.ops)],
        [*sizes, sizes[-1]],
        where="post",
        color=_LINE_COLOR,
        linewidth=1.2,
        label="reserved by the allocator",
    )


def _draw_phases(axes: Axes, trace: MemoryTrace) -> None:
    """Draw a thin line where each phase begins, and its name where there is room."""
    for (start, name), (end, _) in itertools.pairwise([*trace.marks, (len(trace.ops), "")]):
        if start:
            axes.axvline(start, color="white", linewidth=1.2)
            axes.axvline(start, color=_LINE_COLOR, linewidth=0.5)
        share = (end - start) / max(len(trace.ops), 1)
        if share >= _MIN_LABEL_WIDTH:
            axes.text(
                (start + end) / 2,
                0.985,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=9,
                color=_LINE_COLOR,
                rotation=90 if share < _CHARACTER_WIDTH * (len(name) + 2) else 0,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                zorder=5,
            )
