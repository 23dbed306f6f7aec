"""Tables that are objects: data frames and Series of pandas, and frames that turn into them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lowtide.core.errors import UsageError, install_extra
from lowtide.media.series_columns import LONG
from lowtide.media.table_words import STAMPS, require_distinct

if TYPE_CHECKING:
    import pandas as pd


class OtherFrame(Protocol):
    """A data frame of another library, such as polars."""

    def to_pandas(self) -> Any:
        """Return it as one of pandas."""
        ...


TableData: TypeAlias = "str | Path | pd.DataFrame | pd.Series | OtherFrame"


def frame_of(data: Any, *, counted: bool = False) -> pd.DataFrame:
    """Return a data frame whose columns have names, and an index of stamps or series among them.

    Args:
        data: A data frame, one that has ``to_pandas``, or a Series.
        counted: Whether rows are counted, so that a Series needs no stamps.

    Raises:
        UsageError: It is none of these, or a Series without stamps.
        InputError: Two columns have one name.
    """
    import pandas as pd

    kind = type(data).__name__
    if not isinstance(data, pd.DataFrame | pd.Series) and hasattr(data, "to_pandas"):
        try:
            data = data.to_pandas()
        except ImportError as error:
            raise UsageError(
                f"a {kind} needs pyarrow to be read", hint=install_extra("forecast")
            ) from error
    if isinstance(data, pd.Series):
        if not counted and not _tells(data.index):
            raise UsageError(
                "a Series needs stamps as its index",
                hint="series.index = pandas.to_datetime(dates)",
            )
        data = data.to_frame("y" if data.name is None else data.name)
    if not isinstance(data, pd.DataFrame):
        lazy = "collect() makes a frame of it" if hasattr(data, "collect") else None
        raise UsageError(
            f"a table is a file, a data frame or a Series, not of type {kind}",
            hint=lazy or 'pandas.DataFrame({"ds": dates, "y": values})',
        )
    names = [str(name) for name in data.columns]
    require_distinct(names)
    frame = data.set_axis(names, axis=1)
    index = ["date"] if frame.index.names == [None] else [str(name) for name in frame.index.names]
    # Of an index that is a column too, the column counts.
    if _tells(frame.index) and not set(index) & set(names):
        frame = frame.reset_index(names=index)
    return frame.reset_index(drop=True)


def _tells(index: pd.Index) -> bool:
    """Return whether an index is of stamps or names, and does not only number rows."""
    import pandas as pd

    usual = {*STAMPS, *(name for names in LONG for name in names)}
    named = any(str(name).lower() in usual for name in index.names)
    return named or not pd.api.types.is_numeric_dtype(index)
