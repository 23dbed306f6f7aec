"""A run by bands whose kernels a card is told of once, and then starts by itself.

A step of a light model is over on a fast card sooner than Python has issued the next. Nothing of
a run by bands is decided by values, so that all of it can be one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.streaming.bands.certify import tf32_is_allowed
from lowtide.streaming.bands.tolerance import tolerance
from lowtide.streaming.one_shape import refused, require_near
from lowtide.streaming.recorded import Recording, recorder_of

HINT = "leave out recorded=True"
# Results are compared so many rows at a time, or the comparison would take more than the run.
_ROWS = 64


class Replays:
    """Calls of one function that are recorded from the second image of a size on.

    Only the last size is kept: a recording holds what its run takes.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._kept: Recording | None = None

    def __call__(self, run: Callable[[Tensor], Tensor], image: Tensor, of: object = None) -> Tensor:
        """As ``run``, which is ``of`` something that a recording lasts as long as. Raises
        `ModelError` where the run cannot be recorded, or differs so."""
        key = (image.shape, image.stride(), image.dtype, image.device, tf32_is_allowed(), of)
        if key != self._key:
            self._key, self._kept = key, None
            return run(image)
        if self._kept is not None:
            return self._kept(image)
        expected = run(image)
        with refused(RuntimeError, "this run cannot be recorded as a CUDA graph", HINT):
            kept = Recording(run, image, recorder_of(str(image.device)))
            apart = _apart(kept.in_place(image), expected)
        allowed = tolerance([image.dtype]) * float(expected.abs().max())
        require_near(apart, allowed, "recorded run", HINT)
        self._kept = kept
        return expected


def _apart(result: Tensor, other: Tensor) -> float:
    parts = zip(result.split(_ROWS, 2), other.split(_ROWS, 2), strict=True)
    return float(torch.stack([(one - two).abs().max() for one, two in parts]).max())
