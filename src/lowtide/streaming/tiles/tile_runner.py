"""What runs tiles through a network, by the runtime that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from lowtide.core.errors import NotFiniteError
from lowtide.core.signal import ValueAdapter
from lowtide.streaming.tiles.network import RunnableNetwork


class TileRunner(Protocol):
    """Runs equal tiles through a network, converted by an adapter.

    A call is `begin` followed by `finish`. ``fp32_reruns`` counts batches that were redone.
    """

    network: RunnableNetwork
    fp32_reruns: int

    def __call__(self, tiles: Sequence[np.ndarray]) -> np.ndarray:
        """Run (H, W, C) tiles of the source; return float32 (B, H·s, W·s, C)."""
        ...

    def begin(self, tiles: Sequence[np.ndarray]) -> Any:
        """Start the network on the tiles, which are not read again."""
        ...

    def finish(self, pending: Any) -> np.ndarray:
        """Wait for the result of a batch. Raises `NotFiniteError`."""
        ...


class HostTileRunner:
    """`TileRunner` of a network that maps arrays to arrays, in this process's memory."""

    def __init__(self, network: RunnableNetwork, adapter: ValueAdapter) -> None:
        self.network, self._adapter, self.fp32_reruns = network, adapter, 0

    def __call__(self, tiles: Sequence[np.ndarray]) -> np.ndarray:
        """Run (H, W, C) tiles of the source; return float32 (B, H·s, W·s, C)."""
        return self.finish(self.begin(tiles))

    def begin(self, tiles: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Run the network on the tiles."""
        values = np.stack(tiles)
        return values, self.network.forward(self._adapter.to_network(values))

    def finish(self, pending: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Convert the result of a batch. Raises `NotFiniteError`."""
        values, result = pending
        if not np.isfinite(result.sum()):
            raise NotFiniteError
        return self._adapter.from_network(result, values)


def make_tile_runner(
    network: RunnableNetwork, adapter: ValueAdapter, *, overlapped: bool = False
) -> TileRunner:
    """Return what runs tiles through ``network``.

    With ``overlapped`` a GPU computes while tiles are copied to it and from it.
    """
    if network.runtime != "torch":
        return HostTileRunner(network, adapter)
    from lowtide.streaming.tiles.tile_step import AsyncTileTransfer, NetworkTileRunner

    return NetworkTileRunner(
        network, adapter, AsyncTileTransfer(network.device) if overlapped else None
    )
