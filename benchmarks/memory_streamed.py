"""Predicted memory against measured memory of runs that are streamed in bands.

    python benchmarks/memory_streamed.py [--fresh] [--only TEXT] [--limit N]
    python benchmarks/memory_streamed.py --repredict    # plans anew, measurements kept

A photograph through each model at one or two sizes, once by the plan that is thought fastest and
once by one that takes little more than the least. How it is measured: ``memory_runs.py``. The run
reads the graph that planning captured, as runs within small budgets do even at first, and takes
less for it than the plan allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from memory_runs import NAMES, SLOW, RunRow, main

from lowtide.core.heap import HeapMode

ABOUT = "Peak memory of whole streamed runs: predicted by the plan, and measured."


@dataclass(frozen=True)
class StreamedRow(RunRow):
    """One run: ``width`` of the photograph, and whether it is planned for as little as will do."""

    width: int
    least: bool

    @property
    def name(self) -> str:
        """Unique in the file."""
        wanted = "least memory" if self.least else "most speed"
        return f"{self.entry} {self.width}×{self.picture[1]} for {wanted}, heap {self.heap}"

    @property
    def picture(self) -> tuple[int, int]:
        """Three by two, an odd height now and then."""
        return self.width, self.width * 2 // 3

    @property
    def options(self) -> dict[str, Any]:
        """In bands, whatever is faster."""
        return {"strategy": "streamed"}

    @property
    def scarce(self) -> bool:
        """Whether the budget is little more than the least that any plan needs."""
        return self.least


def rows() -> Iterator[StreamedRow]:
    """All rows: per model one or two sizes, two budgets each, with every heap."""
    from zoo_models import ENTRIES

    for heap in get_args(HeapMode):  # what a model costs is learned for each
        for name in NAMES:
            if name in ENTRIES:  # the trained ones are there where their data are
                sizes = ENTRIES[name].sizes
                for width in sizes[1:2] if name in SLOW else sizes[1:]:
                    for least in (False, True):
                        yield StreamedRow(entry=name, heap=heap, width=2 * width, least=least)


if __name__ == "__main__":
    main("memory_streamed", ABOUT, StreamedRow, rows(), doc=__doc__)
