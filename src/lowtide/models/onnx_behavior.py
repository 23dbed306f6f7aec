"""What an ONNX file does with small images: scale, rule for sizes, and the values it works in.

All of it is found in a process of its own (`onnx_probe`), and without PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import SizeRule
from lowtide.models.metadata_limits import metadata_error, parse_json, size_rule
from lowtide.models.onnx_metadata import OnnxMetadata
from lowtide.models.onnx_runtime import CannotRunError, as_failure, runtime_errors

# Sides of images by which a file without metadata shows its scale, and of one for others.
_SIDES, _LITTLE = (64, 128), (16,)
# What sides may have to be multiples of, looked for at about so many pixels; the least side is one
# of them too.
_GRIDS = (1, 2, 4, 8, 16, 32, 64)
_TRIED = 48
# Values of white at both ends, the usual ones first, and the grays that tell them apart: a model
# gives gray for gray, by up to `_NEAR` if it is to be sure, and where that is so in two ways, one
# is taken that is so many times nearer.
_WHITES = ((1, 1), (1, 255), (255, 255), (255, 1))
_GRAYS = (0.25, 0.75)
_NEAR, _TIMES_NEARER = 0.05, 4
# By which a result may be off before other values than 0..1 are thought of: a graph that has 255
# among its numbers says so itself, and one that has not may just change the light.
_OFF, _OFF_UNSAID = 1e-4, 0.02
# A result that is further from 0..1 is in values of another kind.
_FURTHEST = 1.0


@dataclass(frozen=True)
class ProbedModel:
    """What a file says, and what it does: ``facts`` with the values found, how many times it
    enlarges, channels of the result, and the rule for sizes."""

    facts: OnnxMetadata
    scale: int
    channels: int
    size: SizeRule


class ProbeRun:
    """A session's graph, run on images of one value; ``tell`` is told each of them in words.

    Gives what it makes of (1, C, H, W). Raises `CannotRunError` and `MemoryError`.
    """

    def __init__(self, session: Any, facts: OnnxMetadata, tell: Callable[[str], None]) -> None:
        self._session, self._ends, self._tell = session, facts.ends, tell

    def __call__(self, height: int, width: int, value: float = 0.5) -> np.ndarray:
        ends = self._ends
        self._tell(f"an image of {width}×{height}")
        image = np.full((1, ends.channels, height, width), value, ends.given)
        try:
            (found,) = self._session.run([ends.result], {ends.image: image})
        except (*runtime_errors(), RuntimeError) as error:
            raise as_failure(error, f"at {width}×{height}: ") from error
        return np.asarray(found)


def probe_behavior(path: Path, facts: OnnxMetadata, run: ProbeRun) -> ProbedModel:
    """As the file says, and as it does. Raises `ModelError` where that is not one image enlarged
    by a whole number, and `CannotRunError`."""
    try:
        said = int(facts.entries["scale"]) if "scale" in facts.entries else None
    except ValueError as error:
        raise ModelError(f"{metadata_error(path)}: scale: {error}") from error
    entry = facts.entries.get("size")
    rule = (
        None
        if entry is None
        else size_rule(metadata_error(path), parse_json(path, "lowtide.size", entry))
    )
    size, made = _first_run(run, rule)
    scale = _scale(path, (1, facts.ends.channels, *size), made)
    if said not in (None, scale):
        raise ModelError(f"{path} enlarges by {scale}, and its metadata say by {str(said)[:20]}")
    if rule is None:
        rule = _found_rule(path, run, scale)
    if "checked" not in facts.entries:  # which `lowtide export onnx` writes, of values in 0..1
        given, white = _white(path, run, size, names_it=facts.names_white)
        facts = replace(facts, ends=replace(facts.ends, white_given=given, white_made=white))
    rows, columns = rule.padding(1, 1)
    run(1 + rows, 1 + columns)  # as whoever uses the file will, to begin with
    return ProbedModel(facts, scale, made[1], rule)


def cannot_run(path: Path, error: CannotRunError) -> ModelError:
    """The error of a file that the runtime refuses."""
    return ModelError(
        f"{path} cannot be run by ONNX Runtime: {error.message}",
        hint="a newer onnxruntime may do: pip install --upgrade onnxruntime",
    )


def _first_run(run: ProbeRun, rule: SizeRule | None) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Height and width of an image that the graph runs, and the shape of what it makes of it."""
    for side in _SIDES if rule is None else _LITTLE:
        rows, columns = (rule or SizeRule()).padding(side, side)
        try:
            return (side + rows, side + columns), run(side + rows, side + columns).shape
        except CannotRunError:
            if side == _SIDES[-1] or rule is not None:
                raise
    raise AssertionError("the last size returns or raises")


def _scale(path: Path, given: tuple[int, ...], made: tuple[int, ...]) -> int:
    scale = made[2] // given[2] if len(made) == 4 else 0
    if not scale or made != (1, made[1], given[2] * scale, given[3] * scale):
        raise ModelError(
            f"{path} makes {'×'.join(map(str, made))} of {'×'.join(map(str, given))}, which is no"
            " image enlarged by a whole number"
        )
    if made[1] != given[1]:
        raise ModelError(
            f"{path} takes {given[1]} channels and gives {made[1]};"
            " Lowtide runs gray (1) and RGB (3)"
        )
    return scale


def _found_rule(path: Path, run: ProbeRun, scale: int) -> SizeRule:
    """The rule of a file that says nothing of it: its grid first, and then its least side."""

    def runs(height: int, width: int) -> bool:
        try:
            made = run(height, width).shape
        except CannotRunError:
            return False
        return made[2:] == (height * scale, width * scale)

    def sides(grid: int) -> tuple[int, int]:
        """Odd multiples, so that they are not on a coarser grid too."""
        times = _TRIED // grid | 1
        return grid * times, grid * (times + 2)

    grid = next((grid for grid in _GRIDS if runs(*sides(grid))), None)
    if grid is None:
        raise ModelError(
            f"{path} runs at {_SIDES[0]}×{_SIDES[0]} or {_SIDES[1]}×{_SIDES[1]} pixels and at none"
            f" of the sizes tried beside, on grids of up to {_GRIDS[-1]}",
            hint="export it for any height and width, with the metadata lowtide.size",
        )
    least = next((side for side in _GRIDS if side >= grid and runs(side, side)), _SIDES[-1])
    return SizeRule(0 if least == grid else least, grid)


def _white(path: Path, run: ProbeRun, size: tuple[int, int], *, names_it: bool) -> tuple[int, int]:
    """The values of white that a file takes and gives, by the grays that it makes of grays.

    A network that enlarges gives gray for gray nearly, in its own values far more so than in
    others. Raises `ModelError` for results far outside 0..1 that are not in 0..255 either.
    """
    made = {
        given: [_middle(run(*size, gray * given)) for gray in _GRAYS] for given in dict(_WHITES)
    }
    errors = {
        (given, white): max(
            abs(value / white - gray) for value, gray in zip(made[given], _GRAYS, strict=True)
        )
        for given, white in _WHITES
    }
    usual, best = errors[1, 1], min(errors, key=lambda pair: errors[pair])
    off = _OFF if names_it else _OFF_UNSAID
    if errors[best] <= _NEAR and usual > max(off, _TIMES_NEARER * errors[best]):
        return best
    if usual > _FURTHEST:
        values = " and ".join(f"{value:.3g}" for value in made[1])
        raise ModelError(
            f"{path} makes values of {values} of grays of {_GRAYS[0]} and {_GRAYS[1]}; Lowtide runs"
            " models whose values are 0..1 or 0..255",
            hint="export it with what its values are divided by",
        )
    return 1, 1


def _middle(image: np.ndarray) -> float:
    """The mean of an image but for its borders, which padding may have changed."""
    height, width = (side // 4 for side in image.shape[2:])
    return float(image[..., height:-height, width:-width].astype(np.float64).mean())
