"""States of a sampling run on disk, and the conversions between them, files and the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowtide.core.scratch import ScratchFile
from lowtide.jobs.images.adapter import NoisyImageAdapter
from lowtide.models.denoiser.sampling import SamplingStep

STATE_FILES = 2  # the state that is read, and the one that is written


class ScratchImage:
    """Image of float32 (H, W, C) in a scratch file, as a source and a sink of any rows."""

    def __init__(self, shape: tuple[int, int, int], folder: Path | None) -> None:
        self.shape, self.dtype = shape, np.dtype(np.float32)
        self._row_bytes = shape[1] * shape[2] * self.dtype.itemsize
        self._file = ScratchFile(folder)

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W, C); none below the image."""
        first, last = min(first, self.shape[0]), min(last, self.shape[0])
        rows = np.empty((last - first, *self.shape[1:]), self.dtype)
        if rows.size:
            self._file.read(first * self._row_bytes, rows.view(np.uint8).data.cast("B"))
        return rows

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows (N, W, C) from row ``first`` on."""
        rows = np.ascontiguousarray(values, self.dtype)
        self._file.write(first * self._row_bytes, rows.view(np.uint8).data.cast("B"))

    def close(self) -> None:
        """Release the file; may be called more than once."""
        self._file.close()


class SamplingStepSink:
    """Sink of a step's clean image: writes the next state, row by row.

    Args:
        after: Takes the next state.
        earlier: Files of earlier predictions, of step i the one at i modulo their number. This
            step's takes the place of the oldest, whose rows are read before.
    """

    def __init__(
        self,
        step: SamplingStep,
        state: ScratchImage,
        after: ScratchImage,
        earlier: Sequence[ScratchImage],
        seed: int,
    ) -> None:
        self._step, self._state, self._after, self._seed = step, state, after, seed
        self._earlier = earlier

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows (N, W, C) of the clean image from row ``first`` on."""
        step, last, files = self._step, first + len(values), self._earlier
        ages = range(1, len(step.earlier) + 1)
        earlier = [files[(step.index - age) % len(files)].read(first, last) for age in ages]
        state = self._state.read(first, last)
        self._after.write(first, step.advance(state, values, earlier, seed=self._seed, first=first))
        if files:
            files[step.index % len(files)].write(first, values)


class SamplingStateAdapter:
    """`lowtide.core.signal.ValueAdapter` between states and network: clamped nowhere.

    States are the color, in float32, that ``ends`` makes of an image.
    """

    def __init__(self, ends: NoisyImageAdapter) -> None:
        self._ends = ends
        self.inputs, self.channels = ends.inputs, ends.color_channels
        self.context: int | None = None
        self.dtype = np.dtype(np.float32)

    def to_network(self, values: np.ndarray) -> np.ndarray:
        """Convert states (B, H, W, C) to inputs (B·inputs, channels, H, W)."""
        return self._ends.color_to_inputs(np.array(np.moveaxis(values, -1, 1), order="C"))

    def from_network(self, results: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Convert a network's results to states (B, H, W, C)."""
        return np.moveaxis(self._ends.color_from_outputs(results), 1, -1)

    def to_sink(self, floats: np.ndarray) -> np.ndarray:
        """Return the values as they are."""
        return floats
