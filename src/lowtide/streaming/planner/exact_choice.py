"""Choice among candidates whose bytes are drafts until a dry run makes them exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lowtide.core.errors import BudgetError

_Candidate = TypeVar("_Candidate")


def choose_exact(
    best: Callable[[bool], _Candidate],
    last_resort: Callable[[], _Candidate],
    is_exact: Callable[[_Candidate], object],
    dry_run: Callable[[_Candidate], object],
) -> _Candidate:
    """Return the candidate that is best once its bytes are exact.

    Drafts are dry-run one by one, as each may make another the best. Those for scarce memory are
    considered where no other fits; where they do not fit either, those that only a correction rules
    out are tried, so that the bytes that an error names suffice.

    Args:
        best: The best by what is known, without or with drafts for scarce memory; raises
            `BudgetError` where none fits.
        last_resort: The one to try where none fits: that only a correction rules out, or else the
            smallest.
        is_exact: Whether a candidate is more than a draft.
        dry_run: Makes a draft exact.

    Raises:
        BudgetError: No candidate fits; that of ``best``, where the smallest is exact.
    """
    for low_memory in (False, True):
        while True:
            failure = None
            try:
                chosen = best(low_memory)
            except BudgetError as error:
                if not low_memory:
                    break
                failure, chosen = error, last_resort()
            if not is_exact(chosen):
                dry_run(chosen)
            elif failure is not None:
                raise failure
            else:
                return chosen
    raise AssertionError("the last round returns or raises")
