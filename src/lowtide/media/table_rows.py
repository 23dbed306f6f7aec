"""Rows of tables that cannot be used."""

from __future__ import annotations


class RowError(Exception):
    """A row that cannot be used: its number from 0, what is wrong, and a hint.

    ``first`` is an earlier row that it contradicts.
    """

    def __init__(
        self, row: int, message: str, hint: str | None = None, first: int | None = None
    ) -> None:
        super().__init__(message)
        self.row, self.message, self.hint, self.first = row, message, hint, first
