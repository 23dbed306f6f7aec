"""Probing of an ONNX file with small images: scale, size rule and value range.

A graph is a program: it may run for ever, need any amount of memory, or crash the runtime. So it is
probed in a subprocess, without PyTorch, that reports each step before it starts, so that each has
its own timeout.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from lowtide.core.errors import ModelError
from lowtide.core.python_child import start_python
from lowtide.models.descriptor import SizeRule
from lowtide.models.model_files import metadata_error, parse_json, size_rule
from lowtide.models.onnx_metadata import GraphSignature, OnnxMetadata, read_onnx_metadata
from lowtide.models.onnx_runtime import (
    ONE_SIZE,
    CannotRunError,
    convert_error,
    open_session,
    runtime_errors,
)

# Timeout of reading the file, and of each small image: a model that needs longer would need hours
# for a photograph.
_TIMEOUT_SECONDS = 20
# Memory limit: bytes for the runtime and activations, plus several copies of the file's tensors.
_BYTES, _BYTES_FACTOR = 4 << 30, 8
_MAIN = "lowtide.models.onnx_probe:probe_main"
# Sides of the images that probe the scale of a file without metadata, and of one for files with it.
_SIDES, _LITTLE = (64, 128), (16,)
# Multiples that sides may need, probed at about _TRIED pixels; the minimum is one of them too.
_GRIDS = (1, 2, 4, 8, 16, 32, 64)
_PROBE_SIDE = 48
# White levels of input and output, the usual ones first, and the grays that distinguish them: a
# model returns gray for gray, within `_NEAR` to be certain, and of two candidates the second is
# taken only if it is `_TIMES_NEARER` times nearer.
_WHITE_LEVELS = ((1, 1), (1, 255), (255, 255), (255, 1))
_GRAYS = (0.25, 0.75)
_NEAR, _TIMES_NEARER = 0.05, 4
# Error above which white levels other than 1 are considered: smaller where the graph has 255 among
# its constants, larger where it has not and may just change the brightness.
_OFF, _OFF_UNSAID = 1e-4, 0.02
# A result further from 0..1 has another value range.
_FURTHEST = 1.0


@dataclass(frozen=True)
class ProbedOnnxModel:
    """Metadata and probed behavior of an ONNX file.

    ``facts`` with the white levels found, ``scale``, ``channels`` of the result, and the size rule.
    """

    facts: OnnxMetadata
    scale: int
    channels: int
    size: SizeRule


def probe_onnx(path: Path) -> ProbedOnnxModel:
    """Probe an ONNX file in a subprocess.

    Raises `ModelError` where it is damaged, does not map one image to one upscaled by an integer
    factor, or fails: an error of the runtime, a crash, a lack of memory, or a timeout.
    """
    lines: queue.Queue[bytes] = queue.Queue()
    errors: list[bytes] = []
    with start_python(
        _MAIN,
        str(path),
        str(_threads()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        listeners = [
            threading.Thread(target=_listen, args=pair, daemon=True)
            for pair in ((child.stdout, lines.put), (child.stderr, errors.append))
        ]
        for one in listeners:
            one.start()
        try:
            line, step = _last(path, lines)
            status = child.wait(_TIMEOUT_SECONDS)
        finally:
            child.kill()
            for one in listeners:
                one.join()
        if "error" in line:
            raise ModelError(line["error"], hint=line["hint"])
        if "found" not in line:
            raise _crash_error(path, step, status, b"".join(errors))
    return _parse_result(line["found"])


def _last(path: Path, lines: queue.Queue[bytes]) -> tuple[dict[str, Any], str]:
    """Return the subprocess's last line, empty if it ended without one, and last step."""
    step = "reading it"
    while True:
        try:
            line = json.loads(lines.get(timeout=_TIMEOUT_SECONDS) or "{}")
        except queue.Empty:
            raise ModelError(
                f"{path} was rejected: {step} takes more than {_TIMEOUT_SECONDS} s",
                hint="the file may be damaged or hostile; or close other programs and try again",
            ) from None
        if "step" not in line:
            return line, step
        step = line["step"]


def _listen(pipe: IO[bytes], put: Callable[[bytes], None]) -> None:
    """Pass on each line of a pipe, and an empty one at the end."""
    for line in pipe:
        put(line)
    put(b"")


def _crash_error(path: Path, step: str, status: int, errors: bytes) -> ModelError:
    names = {one.value: one.name for one in signal.Signals}
    lines = errors.decode(errors="replace").strip().splitlines() or [f"status {status}"]
    how = (
        f"was terminated by {names.get(-status, -status)}" if status < 0 else f"ended: {lines[-1]}"
    )
    return ModelError(
        f"{path} was rejected: ONNX Runtime {how}, while {step}",
        hint="the file may be damaged or hostile, or need more memory than is available",
    )


def _parse_result(found: dict[str, Any]) -> ProbedOnnxModel:
    facts = found.pop("facts")
    ends, size = GraphSignature(**facts.pop("signature")), SizeRule(**found.pop("size"))
    return ProbedOnnxModel(facts=OnnxMetadata(signature=ends, **facts), size=size, **found)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def probe_main() -> None:
    """Entry point of the subprocess: probe the file in argv and print JSON lines."""
    path = Path(sys.argv[1])
    try:
        _limit(path)
        facts = read_onnx_metadata(path)
        session = open_session(path, int(sys.argv[2]))
        found = probe_behavior(path, facts, ProbeRun(session, facts, lambda step: _send(step=step)))
        _send(found=dataclasses.asdict(found))
    except CannotRunError as error:
        refused = cannot_run(path, error)
        _send(error=refused.message, hint=refused.hint)
    except ModelError as error:
        _send(error=error.message, hint=error.hint)
    except MemoryError as error:
        _send(error=f"{path} was rejected: it needs too much memory ({error})", hint=None)


def _send(**line: Any) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201  (read by the parent process)


def _limit(path: Path) -> None:
    if sys.platform.startswith("linux"):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = (_BYTES + _BYTES_FACTOR * path.stat().st_size, soft, hard)
        most = min(one for one in wanted if one != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


class ProbeRun:
    """Callable that runs a session on a constant image.

    ``progress`` is called with a description of each image. Raises `CannotRunError` and
    `MemoryError`.
    """

    def __init__(self, session: Any, facts: OnnxMetadata, progress: Callable[[str], None]) -> None:
        self._session, self._signature, self._progress = session, facts.signature, progress

    def __call__(self, height: int, width: int, value: float = 0.5) -> np.ndarray:
        """Return the graph's output for (1, C, ``height``, ``width``) filled with ``value``."""
        ends = self._signature
        self._progress(f"running an image of {width}×{height}")
        image = np.full((1, ends.channels, height, width), value, ends.input_dtype)
        try:
            (found,) = self._session.run([ends.output_name], {ends.input_name: image})
        except (*runtime_errors(), RuntimeError) as error:
            raise convert_error(error, f"at {width}×{height}: ") from error
        return np.asarray(found)


def probe_behavior(path: Path, facts: OnnxMetadata, run: ProbeRun) -> ProbedOnnxModel:
    """Probe scale, size rule and value range of a file, and check its metadata.

    Raises `ModelError` where it does not upscale one image by an integer factor, and
    `CannotRunError`.
    """
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
    scale = _scale(path, (1, facts.signature.channels, *size), made)
    if said not in (None, scale):
        raise ModelError(f"{path} upscales by {scale}, but its metadata says {str(said)[:20]}")
    if rule is None:
        rule = _probe_size_rule(path, run, scale)
    if "checked" not in facts.entries:  # `lowtide export onnx` writes it, with values in 0..1
        given, white = _probe_white_levels(
            path, run, size, has_white_constant=facts.has_white_constant
        )
        facts = replace(
            facts, signature=replace(facts.signature, input_white=given, output_white=white)
        )
    rows, columns = rule.padding(1, 1)
    run(1 + rows, 1 + columns)  # the first image that OnnxSession runs
    return ProbedOnnxModel(facts, scale, made[1], rule)


def cannot_run(path: Path, error: CannotRunError) -> ModelError:
    """Build the ModelError of a file that ONNX Runtime refuses."""
    return ModelError(
        f"{path} cannot be run by ONNX Runtime: {error.message}",
        hint=error.hint or "a newer onnxruntime may run it: pip install --upgrade onnxruntime",
    )


def _first_run(run: ProbeRun, rule: SizeRule | None) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return (height, width) of an image that the graph runs, and the output shape."""
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
            f"{path} maps {'×'.join(map(str, given))} to {'×'.join(map(str, made))}, which is not"
            " an image upscaled by an integer factor",
            hint=ONE_SIZE if len(made) == 4 and made[2] > given[2] else None,
        )
    if made[1] != given[1]:
        raise ModelError(
            f"{path} takes {given[1]} channels and returns {made[1]};"
            " Lowtide runs grayscale (1) and RGB (3)"
        )
    return scale


def _probe_size_rule(path: Path, run: ProbeRun, scale: int) -> SizeRule:
    """Probe the size rule of a file without metadata: its multiple, then its minimum."""

    def runs(height: int, width: int) -> bool:
        """Return whether the graph upscales an image of this size."""
        try:
            made = run(height, width).shape
        except CannotRunError:
            return False
        return made[2:] == (height * scale, width * scale)

    def sides(grid: int) -> tuple[int, int]:
        """Return two odd multiples of ``grid``, which no coarser grid contains."""
        times = _PROBE_SIDE // grid | 1
        return grid * times, grid * (times + 2)

    grid = next((grid for grid in _GRIDS if runs(*sides(grid))), None)
    if grid is None:
        raise ModelError(
            f"{path} runs at {_SIDES[0]}×{_SIDES[0]} or {_SIDES[1]}×{_SIDES[1]} pixels, but at none"
            f" of the other sizes tried, which are multiples of up to {_GRIDS[-1]}",
            hint="export it for any height and width, with the metadata lowtide.size",
        )
    least = next((side for side in _GRIDS if side >= grid and runs(side, side)), _SIDES[-1])
    return SizeRule(0 if least == grid else least, grid)


def _probe_white_levels(
    path: Path, run: ProbeRun, size: tuple[int, int], *, has_white_constant: bool
) -> tuple[int, int]:
    """Probe the white levels of input and output by the grays made of grays.

    A super-resolution network maps gray to nearly the same gray, far more exactly in its own value
    range than in others. Raises `ModelError` for results far outside 0..1 that are not in 0..255
    either.
    """
    made = {
        given: [_central_mean(run(*size, gray * given)) for gray in _GRAYS]
        for given in dict(_WHITE_LEVELS)
    }
    errors = {
        (given, white): max(
            abs(value / white - gray) for value, gray in zip(made[given], _GRAYS, strict=True)
        )
        for given, white in _WHITE_LEVELS
    }
    usual, best = errors[1, 1], min(errors, key=lambda pair: errors[pair])
    off = _OFF if has_white_constant else _OFF_UNSAID
    if errors[best] <= _NEAR and usual > max(off, _TIMES_NEARER * errors[best]):
        return best
    if usual > _FURTHEST:
        values = " and ".join(f"{value:.3g}" for value in made[1])
        raise ModelError(
            f"{path} maps grays of {_GRAYS[0]} and {_GRAYS[1]} to values of {values}; Lowtide runs"
            " models whose values are 0..1 or 0..255",
            hint="export it with the scaling of its values included",
        )
    return 1, 1


def _central_mean(image: np.ndarray) -> float:
    """Return the mean of an image without its borders, which padding may have changed."""
    height, width = (side // 4 for side in image.shape[2:])
    return float(image[..., height:-height, width:-width].astype(np.float64).mean())
