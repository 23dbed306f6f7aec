"""Pictures of forecasts: history, bands, median and mean of each series; PIT histograms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.figure_file import new_figure, save_figure
from lowtide.media.time_table import TimeTable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from lowtide.jobs.forecast.report import BacktestReport

_MOST_SERIES = 12
_HISTORY = 3  # horizons


def plot_forecast(
    path: Path, table: TimeTable, frame: pd.DataFrame, quantiles: dict[str, float], *, replace: bool
) -> None:
    """Write a picture with one panel for each series, the first twelve of many.

    Args:
        path: A file that matplotlib can write: PNG, SVG, PDF.
        table: The measurements.
        frame: Its forecast: one row for each series and step, means and quantiles.
        quantiles: Levels by the names of their columns. Those that belong together, such as 0.1 and
            0.9, are drawn as a band.
        replace: Whether a file that is there in the end is replaced.
    """
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    stamp = table.columns[1]
    names, past = table.names[:_MOST_SERIES], table.grid.with_zone(table.grid.stamps)
    steps = len(frame) // len(table.names)
    shown = max(_HISTORY * steps, 4 * table.grid.season)
    figure = new_figure(9, 1.4 + 2.2 * len(names))
    panels = figure.subplots(len(names), 1, squeeze=False)[:, 0]
    for number, (name, panel) in enumerate(zip(names, panels, strict=True)):
        ahead = frame.iloc[number * steps : (number + 1) * steps]
        part = slice(max(0, table.ends[number] - shown), table.ends[number])
        _draw_history(panel, past[part], table.values[part, number])
        _draw_forecast(panel, ahead, stamp, quantiles)
        panel.set_ylabel(name, fontsize=9)
        panel.margins(x=0.01)
        panel.spines[["top", "right"]].set_visible(False)
        if frame[stamp].dtype.kind == "M":
            locator = AutoDateLocator(tz=getattr(past, "tz", None))
            panel.xaxis.set_major_locator(locator)
            panel.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=locator.tz))
    some = f", the first {len(names)} of {len(table.names)} series" * (
        len(table.names) > len(names)
    )
    figure.suptitle(
        f"{steps:,} steps ({table.grid.frequency}) ahead{some}", x=0.02, ha="left", fontsize=10
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8)
    save_figure(figure, path, replace=replace)


def _draw_history(panel: Axes, stamps: pd.Index, values: np.ndarray) -> None:
    """Draw values [T] as a line, with gaps where there are none, and as points between gaps."""
    panel.plot(stamps, values, color="0.3", lw=1, label="history")
    known = np.pad(np.isfinite(values), 1)
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    panel.plot(stamps[alone], values[alone], ".", color="0.3", ms=3)


def _draw_forecast(
    panel: Axes, ahead: pd.DataFrame, stamp: str, quantiles: dict[str, float]
) -> None:
    """Draw the bands that the levels of one series make, its median and its mean."""
    levels = {round(level, 6): name for name, level in quantiles.items()}
    bands = [(low, round(1 - low, 6)) for low in sorted(levels) if low < 0.5]
    bands = [(low, high) for low, high in bands if high in levels]
    for number, (low, high) in enumerate(bands):
        between = ahead[levels[low]], ahead[levels[high]]
        shade = 0.15 + 0.3 * number / max(len(bands), 1)
        label = f"{100 * (high - low):g} % band"
        panel.fill_between(ahead[stamp], *between, alpha=shade, color="C0", lw=0, label=label)
    if 0.5 in levels:
        panel.plot(ahead[stamp], ahead[levels[0.5]], color="C0", lw=1.2, label="median")
    panel.plot(ahead[stamp], ahead["mean"], color="C1", lw=1, ls="--", label="mean")


def plot_pit(path: Path, report: BacktestReport, *, replace: bool) -> None:
    """Write PIT histograms: a row of panels for each horizon, a panel for each method.

    Where forecast distributions are right, all bars are as high as the line. Bars that are high at
    both ends are of bands too narrow, in the middle too wide, at one end of a shifted center.
    """
    methods = list(report.horizons[0].pit)
    figure = new_figure(1 + 2.4 * len(methods), 0.6 + 2.2 * len(report.horizons))
    panels = figure.subplots(
        len(report.horizons), len(methods), squeeze=False, sharex=True, sharey=True
    )
    for row, one in zip(panels, report.horizons, strict=True):
        row[0].set_ylabel(f"{one.horizon} steps")
        for name, panel in zip(methods, row, strict=True):
            shares = one.pit.get(name, [])
            centers = (np.arange(len(shares)) + 0.5) / max(len(shares), 1)
            panel.bar(centers, np.array(shares) * len(shares), 0.9 / max(len(shares), 1))
            panel.axhline(1.0, color="0.3", lw=1)
            panel.set_title(name, fontsize=9)
    save_figure(figure, path, replace=replace)
