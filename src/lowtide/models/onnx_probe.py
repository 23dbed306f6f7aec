"""ONNX files are tried out in a process of its own, with a limit of time and memory.

A graph is a program: it may run for ever, want any amount of memory, or crash the runtime. The
process says before each step what it does next, so that each has its own time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import SizeRule
from lowtide.models.onnx_behavior import ProbedModel, ProbeRun, cannot_run, probe_behavior
from lowtide.models.onnx_metadata import GraphSignature, OnnxMetadata, read_onnx_metadata
from lowtide.models.onnx_runtime import CannotRunError, open_session

# For reading the file, and for each small image: a model that needs longer would need hours for a
# photograph.
_SECONDS = 20
# For the runtime and what lies between layers; tensors are in memory several times at most.
_BYTES, _TIMES = 4 << 30, 8
_CHILD = "from lowtide.models.onnx_probe import probe_main; probe_main()"


def probe_onnx(path: Path) -> ProbedModel:
    """What the file says and does.

    Raises `ModelError` where it is damaged, is no model from one image to one enlarged by a whole
    number, or fails: an error of the runtime's, a crash, a lack of memory, or no end.
    """
    # -P: nothing is imported from the folder that happens to be the current one.
    words = [sys.executable, "-P", "-c", _CHILD, str(path), str(_threads())]
    said: queue.Queue[bytes] = queue.Queue()
    errors: list[bytes] = []
    with subprocess.Popen(
        words,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        listeners = [
            threading.Thread(target=_listen, args=pair, daemon=True)
            for pair in ((child.stdout, said.put), (child.stderr, errors.append))
        ]
        for one in listeners:
            one.start()
        try:
            line, step = _last(path, said)
            status = child.wait(_SECONDS)
        finally:
            child.kill()
            for one in listeners:
                one.join()
        if "error" in line:
            raise ModelError(line["error"], hint=line["hint"])
        if "found" not in line:
            raise _died(path, step, status, b"".join(errors))
    return _probed(line["found"])


def _last(path: Path, said: queue.Queue[bytes]) -> tuple[dict[str, Any], str]:
    """The process's last line, or an empty one where it ended without, and its last step."""
    step = "reading it"
    while True:
        try:
            line = json.loads(said.get(timeout=_SECONDS) or "{}")
        except queue.Empty:
            raise ModelError(
                f"{path} was given up: {step} takes more than {_SECONDS} s",
                hint="the file may be damaged or hostile; or close other programs and try again",
            ) from None
        if "step" not in line:
            return line, step
        step = line["step"]


def _listen(pipe: IO[bytes], put: Callable[[bytes], None]) -> None:
    """Pass on each line, and an empty one at the end."""
    for line in pipe:
        put(line)
    put(b"")


def _died(path: Path, step: str, status: int, errors: bytes) -> ModelError:
    names = {one.value: one.name for one in signal.Signals}
    lines = errors.decode(errors="replace").strip().splitlines() or [f"status {status}"]
    how = f"was ended by {names.get(-status, -status)}" if status < 0 else f"ended: {lines[-1]}"
    return ModelError(
        f"{path} was given up: ONNX Runtime {how}, while {step}",
        hint="the file may be damaged or hostile, or want more memory than there is",
    )


def _probed(found: dict[str, Any]) -> ProbedModel:
    facts = found.pop("facts")
    ends, size = GraphSignature(**facts.pop("ends")), SizeRule(**found.pop("size"))
    return ProbedModel(facts=OnnxMetadata(ends=ends, **facts), size=size, **found)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _environment() -> dict[str, str]:
    """What this process imports, the other one does too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def probe_main() -> None:
    """The other process: probe the file that is named on the command line, and print lines of
    JSON."""
    path = Path(sys.argv[1])
    try:
        _limit(path)
        facts = read_onnx_metadata(path)
        session = open_session(path, int(sys.argv[2]))
        found = probe_behavior(path, facts, ProbeRun(session, facts, lambda step: _say(step=step)))
        _say(found=dataclasses.asdict(found))
    except CannotRunError as error:
        refused = cannot_run(path, error)
        _say(error=refused.message, hint=refused.hint)
    except ModelError as error:
        _say(error=error.message, hint=error.hint)
    except MemoryError as error:
        _say(error=f"{path} was given up: it takes too much memory ({error})", hint=None)


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201  (what the other process reads)


def _limit(path: Path) -> None:
    if sys.platform.startswith("linux"):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = (_BYTES + _TIMES * path.stat().st_size, soft, hard)
        most = min(one for one in wanted if one != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
