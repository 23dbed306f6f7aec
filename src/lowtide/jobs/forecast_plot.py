"""Picture of a forecast: history, median and bands of each series."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import UsageError
from lowtide.media.table import TimeTable

if TYPE_CHECKING:
    import pandas as pd

_MOST_SERIES = 12
_BANDS = ((0.05, 0.95, 0.2, "90 %"), (0.25, 0.75, 0.4, "50 %"))
_HISTORY = 3  # horizons


def plot_forecast(
    path: Path, table: TimeTable, stamps: pd.DatetimeIndex, paths: np.ndarray
) -> None:
    """Write a picture with one panel for each series, the first twelve of many.

    Args:
        path: A file that matplotlib can write: PNG, SVG, PDF.
        table: The measurements.
        stamps: Stamps [H] of the steps ahead.
        paths: Sample paths [S, H, D].
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "a plot needs matplotlib", hint="pip install 'lowtide[forecast]'"
        ) from error
    names = table.names[:_MOST_SERIES]
    shown = min(len(table.values), max(_HISTORY * len(stamps), 4 * table.grid.season))
    figure = Figure(figsize=(9, 1 + 2.2 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0]
    for number, (name, panel) in enumerate(zip(names, panels, strict=True)):
        panel.plot(table.grid.stamps[-shown:], table.values[-shown:, number], color="0.3", lw=1)
        for low, high, alpha, label in _BANDS:
            band = np.quantile(paths[..., number], (low, high), axis=0)
            panel.fill_between(stamps, *band, alpha=alpha, color="C0", lw=0, label=label)
        panel.plot(
            stamps, np.median(paths[..., number], axis=0), color="C0", lw=1.2, label="median"
        )
        panel.set_title(name, loc="left", fontsize=9)
        panel.margins(x=0.01)
    panels[0].legend(fontsize=8, loc="upper left")
    if len(table.names) > len(names):
        figure.suptitle(f"the first {len(names)} of {len(table.names)} series", fontsize=9)
    kind = path.suffix.lstrip(".").lower() or "png"
    with atomic_output(path) as part:
        figure.savefig(part, dpi=120, format=kind)
