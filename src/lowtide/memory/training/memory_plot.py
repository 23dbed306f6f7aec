"""Plot of a run's memory: bytes alive at each operator, by kind, and the budget."""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import UsageError
from lowtide.core.figure_file import new_figure, require_figure_name, save_figure
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.prediction.estimate import Estimate
from lowtide.memory.simulation.allocator import CachingAllocator
from lowtide.memory.tracing.trace import KINDS, Kind, StorageEvent, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS = 4000
# Okabe and Ito's colorblind-safe palette, darkest at the bottom.
_COLORS: dict[str, str] = {
    "context": "#bdbdbd",
    "weights": "#0072b2",
    "optimizer": "#56b4e9",
    "gradients": "#009e73",
    "inputs": "#cc79a7",
    "activations": "#e69f00",
}
_TITLES: dict[str, str] = {
    "context": "CUDA context",
    "weights": "weights",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "inputs": "inputs",
    "activations": "activations",
}
_BUDGET_COLOR, _LINE_COLOR = "#d55e00", "#333333"
# Shares of the figure's width: a letter of a name, and the least room for a vertical name.
_CHARACTER_WIDTH, _MIN_LABEL_WIDTH = 0.0105, 0.018
# Letters of a title's line that fit above the plot.
_TITLE_WIDTH = 90


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of each kind at sampled events of a trace, in order.

    ``ops`` are the operator numbers of the events.
    """

    ops: list[int]
    kinds: dict[Kind, list[int]]

    @property
    def totals(self) -> list[int]:
        """Bytes of all kinds together, at each point."""
        return [sum(at) for at in zip(*self.kinds.values(), strict=True)]


def memory_curve(trace: Trace, points: int = _MAX_POINTS) -> MemoryCurve:
    """Downsample the memory of ``trace`` to at most ``points`` points, peak included.

    Events are divided into equal buckets; of each, the highest point is kept.
    """
    bucket = -(-(len(trace.events) + 1) // points)
    best: list[tuple[int, int, dict[Kind, int]]] = []
    for number, (op, now) in enumerate(trace.live_by_kind()):
        total = sum(now.values())
        if number % bucket == 0:
            best.append((total, op, dict(now)))
        elif total > best[-1][0]:
            best[-1] = total, op, dict(now)
    return MemoryCurve(
        [op for _, op, _ in best], {kind: [now[kind] for _, _, now in best] for kind in KINDS}
    )


def plot_memory(
    source: Estimate | Trace,
    path: str | Path,
    *,
    budget_bytes: int | None = None,
    title: str | None = None,
) -> Path:
    """Plot the memory of a traced run, by operator and kind, to a file.

    Areas are bytes that tensors hold, exact. For an `Estimate` the CUDA context is drawn below
    them, and what the allocator would have reserved for them as a line above; the expected peak and
    its upper bound, which count workspace too, are horizontal lines, and so is the budget.

    Args:
        path: a file of a format that matplotlib writes: PNG, SVG, PDF.

    Returns:
        The path.

    Raises:
        UsageError: for another suffix, for an estimate that was not traced, and where matplotlib is
            not installed.
        OutputError: if the file cannot be written.
    """
    path = Path(path)
    require_figure_name(path)
    figure = new_figure(10, 5.2)
    trace = source.trace if isinstance(source, Estimate) else source
    if trace is None:
        raise UsageError("this estimate was not traced: it has no memory over time to plot")
    axes = figure.add_subplot()
    estimate = source if isinstance(source, Estimate) else None
    context = _context_bytes(estimate)
    curve = memory_curve(trace)
    _draw_areas(axes, curve, context)
    if context:
        _draw_reserved(axes, trace, context)
    lines = _reference_lines(estimate, budget_bytes)
    top = max([max(curve.totals) + context, *(size for _, size, _ in lines)]) / MIB * 1.16
    axes.set_ylim(0, top)
    axes.set_xlim(0, max(len(trace.ops), 1))
    _draw_phases(axes, trace)
    _draw_peak(axes, trace, curve, context)
    for name, size, style in lines:
        _draw_line(axes, name, size, style)
    _format_axes(axes, title or (f"Memory on {estimate.device}" if estimate else "Memory"))
    save_figure(figure, path)
    return path


def _context_bytes(estimate: Estimate | None) -> int:
    rows = estimate.ledger if estimate else ()
    return sum(row.value for row in rows if row.name == "context")


def _draw_areas(axes: Axes, curve: MemoryCurve, context: int) -> None:
    """Draw stacked areas of the kinds present; each point holds until the next."""
    bands: list[tuple[str, list[float]]] = [("context", [context / MIB] * len(curve.ops))]
    bands += [(kind, [size / MIB for size in sizes]) for kind, sizes in curve.kinds.items()]
    bands = [band for band in bands if any(band[1])]
    below = [0.0] * len(curve.ops)
    for name, sizes in sorted(bands, key=lambda band: list(_COLORS).index(band[0])):
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        axes.fill_between(
            curve.ops,
            below,
            above,
            step="post",
            color=_COLORS[name],
            linewidth=0,
            label=_TITLES[name],
        )
        below = above


def _draw_reserved(axes: Axes, trace: Trace, context: int) -> None:
    """Draw the bytes that the caching allocator reserves as a line.

    They do not shrink as tensors are freed.
    """
    allocator, handles = CachingAllocator(), {}
    ops, sizes = [0], [0.0]
    initial = (StorageEvent(0, storage, size) for storage, size in trace.initial.items())
    for op, storage, size in itertools.chain(initial, trace.events):
        if size > 0:
            handles[storage] = allocator.allocate(size)
        elif storage in handles:
            allocator.free(handles.pop(storage))
        now = (allocator.reserved + context) / MIB
        if op == ops[-1]:
            sizes[-1] = now
        elif now != sizes[-1]:
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


def _reference_lines(
    estimate: Estimate | None, budget: int | None
) -> list[tuple[str, int, dict[str, Any]]]:
    lines: list[tuple[str, int, dict[str, Any]]] = []
    if estimate is not None:
        thin: dict[str, Any] = {"color": _LINE_COLOR, "linewidth": 1}
        lines.append(("expected peak", estimate.predicted_bytes, {**thin, "linestyle": "--"}))
        lines.append(("upper bound", estimate.upper_bytes, {**thin, "linestyle": ":"}))
    if budget is not None:
        lines.append(("budget", budget, {"color": _BUDGET_COLOR, "linewidth": 2}))
    return lines


def _draw_line(axes: Axes, name: str, size: int, style: dict[str, Any]) -> None:
    axes.axhline(size / MIB, label=f"{name} {format_bytes(size)}", **style)


def _draw_phases(axes: Axes, trace: Trace) -> None:
    """Draw a thin line where each phase begins, and its name where there is room."""
    starts = [*trace.marks, (len(trace.ops), "")]
    for (start, name), (end, _) in itertools.pairwise(starts):
        if start:
            axes.axvline(start, color="white", linewidth=1.2)
            axes.axvline(start, color=_LINE_COLOR, linewidth=0.5)
        share = (end - start) / max(len(trace.ops), 1)
        if share >= _MIN_LABEL_WIDTH:
            turned = share < _CHARACTER_WIDTH * (len(name) + 2)
            axes.text(
                (start + end) / 2,
                0.985,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=9,
                color=_LINE_COLOR,
                rotation=90 if turned else 0,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                zorder=5,
            )


def _draw_peak(axes: Axes, trace: Trace, curve: MemoryCurve, context: int) -> None:
    totals = curve.totals
    size = max(totals)
    op = curve.ops[totals.index(size)]
    name = trace.ops[op].name.partition(".")[0] if op < len(trace.ops) else "end"
    axes.plot(
        [op],
        [(size + context) / MIB],
        "o",
        color=_LINE_COLOR,
        markersize=5,
        linestyle="none",
        label=f"peak of tensors {format_bytes(size)},\nat {name}",
    )


def _format_axes(axes: Axes, title: str) -> None:
    axes.set_title(textwrap.fill(title, _TITLE_WIDTH), loc="left", fontsize=11)
    axes.set_xlabel("operator")
    axes.set_ylabel("MiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    handles, names = axes.get_legend_handles_labels()
    # In stacking order: the highest area first, then the lines.
    areas = [at for at, name in enumerate(names) if name in _TITLES.values()]
    order = [*reversed(areas), *(at for at in range(len(names)) if at not in areas)]
    axes.legend(
        [handles[at] for at in order],
        [names[at] for at in order],
        frameon=False,
        fontsize=9,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
