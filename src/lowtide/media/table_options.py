"""Options of reading tables, the same for forecasts, backtests and trainings."""

from __future__ import annotations

import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict

from lowtide.core.errors import UsageError, short_repr
from lowtide.core.option import Option

NO_SEASON, AUTO = "none", "auto"


class TableKeywords(TypedDict, total=False):
    """Keyword arguments of reading tables, as `TableOptions` explains them."""

    columns: Sequence[str]
    target: str | None
    time_column: str | None
    id_column: str | None
    known: Sequence[str]
    frequency: str | None
    season: int | str | None
    date_format: str | None
    day_first: bool | None
    decimal: str | None
    timezone: str | None
    consecutive: bool


def _table(metavar: str | None = None) -> Option:
    return Option(panel="Table", metavar=metavar)


@dataclass(frozen=True)
class TableOptions:
    """How a table is read where it does not say so itself.

    Texts of attributes are the help of a command's options.

    Attributes:
        columns: Series to use; all by default.
        target: The one series wanted, the model is of all; or a long table's column of values.
        time_column: Column of dates, or several that are one together: year,month. Default: found.
        id_column: Column of a long table's names of series, or several: store,item. Default: found.
        known: Columns known ahead, in rows after the last value of the others. Default: found.
        frequency: Distance of rows: h, 15min, D, B, W, MS, QS-FEB, "Mon Tue Wed", ... or auto.
        season: Steps of a season, or none. Default: that of the distance.
        date_format: How dates are written, %d.%m.%Y, or what numbers are: excel, year, s, ms, us,
            ns (since 1970), step. Default: found.
        day_first: Whether days stand before months. Default: found.
        decimal: What decimals have, . or , and the other separates thousands. Default: found.
        timezone: Zone of the stamps: its midnights are days, and results are in it. Default: found.
        consecutive: Count rows, whatever the distance of their stamps.

    Raises:
        UsageError: A value makes no sense.
    """

    columns: Annotated[Sequence[str], _table(metavar="NAME,...")] = ()
    target: Annotated[str | None, _table(metavar="NAME")] = None
    time_column: Annotated[str | None, _table(metavar="NAME")] = None
    id_column: Annotated[str | None, _table(metavar="NAME")] = None
    known: Annotated[Sequence[str], _table(metavar="NAME,...")] = ()
    frequency: Annotated[str | None, _table(metavar="NAME")] = None
    season: Annotated[int | str | None, _table(metavar="N|none")] = None
    date_format: Annotated[str | None, _table(metavar="FORMAT")] = None
    day_first: Annotated[bool | None, _table()] = None
    decimal: Annotated[str | None, _table(metavar=".|,")] = None
    timezone: Annotated[str | None, _table(metavar="NAME")] = None
    consecutive: Annotated[bool, _table()] = False

    def __post_init__(self) -> None:
        if self.frequency == AUTO:
            object.__setattr__(self, "frequency", None)
        if self.decimal not in (None, ".", ","):
            raise UsageError(f"a decimal {short_repr(self.decimal)} is none", hint="--decimal ,")
        if self.consecutive and self.frequency is not None:
            raise UsageError("counted rows have no frequency", hint="drop --frequency")
        if self.season is not None and self.own_season is None:
            raise UsageError(
                f"a season of {short_repr(self.season)} steps is none", hint="--season 12, or none"
            )
        if self.timezone is not None:
            try:
                zoneinfo.ZoneInfo(self.timezone)
            except (KeyError, ValueError, OSError) as error:
                raise UsageError(
                    f"there is no time zone {short_repr(self.timezone)}",
                    hint="--timezone Europe/Berlin",
                ) from error

    @property
    def own_season(self) -> int | None:
        """Steps of the season that is asked for; 1 for none, None where nothing is asked for."""
        if self.season == NO_SEASON:
            return 1
        text = str(self.season)
        return int(text) if text.isdecimal() and 0 < len(text) < 9 and int(text) else None


def split_names(text: str | None) -> list[str]:
    """Return the names in a list of names, separated by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]
