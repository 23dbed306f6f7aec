"""Data frames and files of forecasts: quantiles and sample paths by series and step."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import UsageError, install_extra
from lowtide.media.table_file import PARQUET
from lowtide.media.time_table import TimeTable

if TYPE_CHECKING:
    import pandas as pd


def quantile_frame(
    table: TimeTable,
    stamps: Sequence[pd.Index],
    mean: np.ndarray,
    paths: np.ndarray,
    quantiles: dict[str, float],
) -> pd.DataFrame:
    """Return one row for each series and step, in the column names of the table.

    Args:
        table: The measurements.
        stamps: Stamps [D][H] of the steps of each series.
        mean: Means [H, D].
        paths: Sample paths [S, H, D].
        quantiles: Columns of quantiles as `quantile_columns` names them.
    """
    found = np.empty((len(table.names), len(mean), len(quantiles)))
    for step in range(len(mean)):  # one by one: nothing as large as the paths is made
        found[:, step] = np.quantile(paths[:, step], list(quantiles.values()), axis=0).T
    frame = _long_frame(table, stamps)
    frame["mean"] = mean.T.ravel()
    for number, name in enumerate(quantiles):
        frame[name] = found[..., number].ravel()
    return frame


def quantile_columns(levels: Sequence[float], bands: Sequence[float]) -> dict[str, float]:
    """Return the level of each column of quantiles, by its name.

    That is the level, as Chronos-2's have it: ``"0.1"``, ``"0.5"``. Of the ends of ``bands``, told
    by the percentage inside, it is as Nixtla's: ``"lo-80"``, ``"hi-80"``.
    """
    return {
        **{str(float(level)): level for level in levels},
        **{f"lo-{band:g}": (1 - band / 100) / 2 for band in reversed(bands)},
        **{f"hi-{band:g}": (1 + band / 100) / 2 for band in bands},
    }


def sample_frame(table: TimeTable, stamps: Sequence[pd.Index], paths: np.ndarray) -> pd.DataFrame:
    """Return one row for each series and step, and a column for each of ``paths`` [S, H, D].

    ``stamps`` [D][H] are those of the steps of each series.
    """
    import pandas as pd

    columns = pd.DataFrame(
        paths.transpose(2, 1, 0).reshape(-1, len(paths)),
        columns=[f"sample_{number}" for number in range(len(paths))],
    )
    return pd.concat([_long_frame(table, stamps), columns], axis=1)


def require_table_name(path: Path) -> None:
    """Raise `UsageError` for a name of no table, or of Parquet where no package writes them."""
    if path.suffix and path.suffix.lower() not in (".csv", *PARQUET):
        raise UsageError(
            f"{path}: tables are not written as {path.suffix}",
            hint=f"use one of .csv, {', '.join(PARQUET)}",
        )
    if path.suffix.lower() in PARQUET and not any(map(find_spec, ("pyarrow", "fastparquet"))):
        raise UsageError(f"{path}: Parquet files need pyarrow", hint=install_extra("forecast"))


def write_frame(frame: pd.DataFrame, path: Path, *, replace: bool) -> None:
    """Write a frame as CSV, or as Parquet where the name says so."""
    with atomic_output(path, replace=replace) as part:
        if path.suffix.lower() in PARQUET:
            frame.to_parquet(part, index=False)
        else:
            frame.to_csv(part, index=False)


def _long_frame(table: TimeTable, stamps: Sequence[pd.Index]) -> pd.DataFrame:
    """Return the names and stamps of results, in the zone of the table."""
    import pandas as pd

    series, stamp, _ = table.columns
    names = np.array(table.names, object).repeat([len(one) for one in stamps])
    if table.number_ids:
        names = names.astype(np.int64)
    joined = stamps[0].append(list(stamps[1:]))
    return pd.DataFrame({series: names, stamp: table.grid.with_zone(joined)})
