"""Probing of ONNX files in a subprocess with a limit of time and memory.

A graph is a program: it may run for ever, need any amount of memory, or crash the runtime. The
subprocess reports each step before it starts, so that each has its own timeout.
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
from pathlib import Path
from typing import IO, Any

from lowtide.core.errors import ModelError
from lowtide.core.python_child import start_python
from lowtide.models.descriptor import SizeRule
from lowtide.models.onnx_behavior import ProbedModel, ProbeRun, cannot_run, probe_behavior
from lowtide.models.onnx_metadata import GraphSignature, OnnxMetadata, read_onnx_metadata
from lowtide.models.onnx_runtime import CannotRunError, open_session

# Timeout of reading the file, and of each small image: a model that needs longer would need hours
# for a photograph.
_TIMEOUT_SECONDS = 20
# Memory limit: bytes for the runtime and activations, plus several copies of the file's tensors.
_BYTES, _BYTES_FACTOR = 4 << 30, 8
_MAIN = "lowtide.models.onnx_probe:probe_main"


def probe_onnx(path: Path) -> ProbedModel:
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


def _parse_result(found: dict[str, Any]) -> ProbedModel:
    facts = found.pop("facts")
    ends, size = GraphSignature(**facts.pop("signature")), SizeRule(**found.pop("size"))
    return ProbedModel(facts=OnnxMetadata(signature=ends, **facts), size=size, **found)


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
