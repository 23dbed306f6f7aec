"""Predicted memory against measured memory of whole tiled runs, as users have them.

    python benchmarks/memory_tiled.py [--fresh] [--only TEXT] [--limit N]
    python benchmarks/memory_tiled.py --repredict    # plans anew, measurements kept

A photograph of a few tiles through each model, with two or three sizes of tile; the check of tiles
that are not exact is in it. How it is measured: ``memory_runs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from memory_runs import NAMES, SLOW, RunRow, main

from lowtide.core.heap import HeapMode
from lowtide.core.units import MIB

if TYPE_CHECKING:
    from zoo_models import Costs

ABOUT = "Peak memory of whole tiled runs: predicted by the plan, and measured."
# Expected memory of the rows; smaller ones would measure the process more than the tiles.
TARGETS = (160 * MIB, 320 * MIB, 640 * MIB)
# What windows over all of a model's reach leave of a smaller tile would be nothing.
_STEP, _LEAST = 32, 160


@dataclass(frozen=True)
class TiledRow(RunRow):
    """One run: ``tile`` is the side of its tiles in input pixels."""

    tile: int

    @property
    def name(self) -> str:
        """Unique in the file."""
        return f"{self.entry} tiles of {self.tile} px, heap {self.heap}"

    @property
    def picture(self) -> tuple[int, int]:
        """A little larger than a tile each way."""
        return 3 * self.tile // 2, 5 * self.tile // 4

    @property
    def options(self) -> dict[str, Any]:
        """Tiles of this size."""
        return {"strategy": "tiled", "tile": self.tile}


def rows() -> Iterator[TiledRow]:
    """All rows: per model two or three sizes of tile, each with every heap."""
    from zoo_models import ENTRIES

    for heap in get_args(HeapMode):  # what a model costs is learned for each
        for name in NAMES:
            if name in ENTRIES:  # the trained ones are there where their data are
                for tile in _tiles(name, ENTRIES[name].costs):
                    yield TiledRow(entry=name, heap=heap, tile=tile)


def _tiles(name: str, costs: Costs) -> Iterator[int]:
    tile = _LEAST - _STEP
    for target in TARGETS[:2] if name in SLOW else TARGETS:
        side = ((target - costs.weights) / costs.inference) ** 0.5
        tile = max(tile + _STEP, round(side / _STEP) * _STEP)
        yield tile


if __name__ == "__main__":
    main("memory_tiled", ABOUT, TiledRow, rows(), doc=__doc__)
