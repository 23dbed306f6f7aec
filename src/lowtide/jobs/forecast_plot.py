"""Pictures of forecasts: history, median and bands of each series; PIT histograms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.figure_file import new_figure, save_figure
from lowtide.media.time_table import TimeTable

if TYPE_CHECKING:
    import pandas as pd

    from lowtide.jobs.backtest_report import BacktestReport

_MOST_SERIES = 12
_BANDS = ((0.05, 0.95, 0.2, "90 %"), (0.25, 0.75, 0.4, "50 %"))
_HISTORY = 3  # horizons


def plot_forecast(
    path: Path, table: TimeTable, stamps: Sequence[pd.Index], paths: np.ndarray, *, replace: bool
) -> None:
    """Write a picture with one panel for each series, the first twelve of many.

    Args:
        path: A file that matplotlib can write: PNG, SVG, PDF.
        table: The measurements.
        stamps: Stamps [D][H] of the steps ahead of each series.
        paths: Sample paths [S, H, D].
        replace: Whether a file that is there in the end is replaced.
    """
    names = table.names[:_MOST_SERIES]
    shown = min(len(table.values), max(_HISTORY * paths.shape[1], 4 * table.grid.season))
    figure = new_figure(9, 1 + 2.2 * len(names))
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    for number, (name, panel) in enumerate(zip(names, panels, strict=True)):
        panel.plot(table.grid.stamps[-shown:], table.values[-shown:, number], color="0.3", lw=1)
        for low, high, alpha, label in _BANDS:
            band = np.quantile(paths[..., number], (low, high), axis=0)
            panel.fill_between(stamps[number], *band, alpha=alpha, color="C0", lw=0, label=label)
        panel.plot(
            stamps[number],
            np.median(paths[..., number], axis=0),
            color="C0",
            lw=1.2,
            label="median",
        )
        panel.set_title(name, loc="left", fontsize=9)
        panel.margins(x=0.01)
    panels[0].legend(fontsize=8, loc="upper left")
    if len(table.names) > len(names):
        figure.suptitle(f"the first {len(names)} of {len(table.names)} series", fontsize=9)
    save_figure(figure, path, replace=replace)


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
