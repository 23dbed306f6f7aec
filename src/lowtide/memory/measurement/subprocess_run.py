"""Memory measurement of a whole run in a fresh process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import LowtideError, OutOfMemoryError, UsageError
from lowtide.core.python_child import start_python
from lowtide.memory.ledger import LedgerRow, device_row

# From this size on glibc gives a block its own pages and returns them when it is freed, so that
# resident memory follows what is allocated. The default keeps freed blocks for reuse.
_THRESHOLD = ("MALLOC_MMAP_THRESHOLD_", "65536")
_TAIL = 4000
_MAIN = "lowtide.memory.measurement._subprocess_main:main"


class SubprocessUsage(BaseModel):
    """Memory that a run in a fresh process used, in bytes above its imports.

    Attributes:
        target: The function or script.
        peak_bytes: Peak of anonymous resident memory, sampled every 5 ms and corrected by the
            kernel's high-water mark between two samples.
        high_water_bytes: That mark, of all resident pages: it also counts mapped files and library
            code that was touched for the first time. None where the kernel keeps none.
        retained_bytes: What was left at the end.
        seconds: Wall-clock time.
        cpu_seconds: CPU time.
        allocator: Name of the heap, because the figures depend on it.
        result: What the function returned; None for a script.
        exit_status: Not 0 where the run itself asked for that.
        stdout: End of what the run printed.
        stderr: End of what the run printed as errors.
    """

    model_config = ConfigDict(frozen=True)

    target: str
    peak_bytes: int
    high_water_bytes: int | None
    retained_bytes: int
    seconds: float
    cpu_seconds: float
    allocator: str
    result: Any = None
    exit_status: int = 0
    stdout: str = ""
    stderr: str = ""

    @property
    def ledger(self) -> tuple[LedgerRow, ...]:
        """One row, of origin ``"measured"``.

        Its upper value is the kernel's high-water mark.
        """
        upper = max(self.peak_bytes, self.high_water_bytes or 0)
        return (device_row("resident memory", self.peak_bytes, "measured", upper),)


def measure_in_subprocess(
    target: str | os.PathLike[str],
    *args: Any,
    env: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
    imports: Sequence[str] = (),
    warmups: int = 0,
) -> SubprocessUsage:
    """Run ``target`` in a fresh process and measure the memory that it adds.

    The baseline is taken after all imports and warmups. The child has this process's ``sys.path``
    and working folder; processes that it starts are not measured. On Linux with glibc its heap
    returns every block of 64 KiB or more when it is freed, so that resident memory follows what is
    allocated. That costs time: about half as much more, for networks of windows several times as
    much (`FreshUsage.allocator` says so).

    Args:
        target: ``"package.module:function"``, or the path of a Python script.
        args: Arguments of the function, which like its result must be JSON values; command-line
            arguments of a script.
        env: Added to the environment; a variable that is None is removed from it.
        timeout: Most seconds that the run may take.
        imports: Modules imported before the baseline, in addition to the function's; what a script
            imports beyond these counts.
        warmups: Calls of the function before the baseline, for what a process pays only once
            (generated kernels, stacks of threads, late imports).

    Raises:
        OutOfMemoryError: The run ended for lack of memory.
        LowtideError: The run raised, was killed by a signal or exceeded ``timeout``.
        UsageError: ``target`` cannot be found, something is not JSON, or a script has warmups.

    The first two carry the end of the run's standard error.
    """
    name = os.fspath(target)
    spec = {
        "target": name,
        "args": _json_arguments(name, args, warmups),
        "imports": list(imports),
        "warmups": warmups,
    }
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        run = _Run(Path(folder), name)
        status = run.wait(spec, _environment(env), timeout)
        return run.usage(status)


def _json_arguments(name: str, args: tuple[Any, ...], warmups: int) -> list[Any]:
    if ":" not in Path(name).name:
        if not Path(name).is_file():
            raise UsageError(
                f"{name!r} is not an existing script",
                hint='write functions as "package.module:function"',
            )
        if warmups:
            raise UsageError(f"{name} is a script, which runs once", hint="leave out warmups")
        return [os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in args]
    try:
        json.dumps(args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the arguments of {name} cannot be written as JSON: {error}") from None
    return list(args)


def _environment(extra: Mapping[str, str | None] | None) -> dict[str, str]:
    name, value = _THRESHOLD
    settings = {name: value} if sys.platform.startswith("linux") else {}
    merged = {**os.environ, **settings, **(extra or {})}
    return {name: value for name, value in merged.items() if value is not None}


class _Run:
    """Child process of one measured run, with the files it reads and writes."""

    def __init__(self, folder: Path, target: str) -> None:
        self._target = target
        self._spec, self._report = folder / "spec.json", folder / "report.json"
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"

    def wait(self, spec: dict[str, Any], env: dict[str, str], timeout: float | None) -> int:
        """Run the child to its end and return its exit status."""
        with atomic_output(self._spec) as part:
            part.write_text(json.dumps(spec), encoding="utf-8")
        files = str(self._spec), str(self._report)
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            child = start_python(
                _MAIN, *files, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
            try:
                return child.wait(timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                problem = f"did not end within {timeout:g} s"
            except BaseException:
                child.kill()
                child.wait()
                raise
        raise LowtideError(
            self._message(problem), hint="raise timeout, or reduce the work of the run"
        )

    def usage(self, status: int) -> SubprocessUsage:
        """Return the usage that the child reported.

        Raises:
            LowtideError: The child failed or did not finish.
        """
        report: dict[str, Any] = {}
        if self._report.is_file():
            report = json.loads(self._report.read_text(encoding="utf-8"))
        if "usage" in report:
            return SubprocessUsage(
                target=self._target,
                stdout=_tail(self._stdout),
                stderr=_tail(self._stderr),
                **report["usage"],
            )
        if report.get("kind") == "usage":
            raise UsageError(self._message(report["problem"]))
        if report.get("kind") == "memory":
            raise OutOfMemoryError(
                self._message(f"ran out of memory: {report['problem']}"),
                hint="reduce the work of the run",
            )
        raise self._death(report, status)

    def _death(self, report: dict[str, Any], status: int) -> LowtideError:
        if "problem" in report:
            return LowtideError(self._message(f"raised {report['problem']}"))
        if status >= 0:
            return LowtideError(self._message(f"ended with status {status} and reported no memory"))
        number = -status
        known = {entry.value: entry.name for entry in signal.Signals}
        problem = f"was killed by {known.get(number, f'signal {number}')}"
        if number == getattr(signal, "SIGKILL", None):
            return OutOfMemoryError(
                self._message(f"{problem}, as systems end programs when memory runs out"),
                hint="reduce the work of the run, or check the system log",
            )
        return LowtideError(self._message(problem))

    def _message(self, problem: str) -> str:
        printed = _tail(self._stderr).rstrip()
        return f"{self._target} {problem}" + (f"\n{printed}" if printed else "")


def _tail(path: Path) -> str:
    return path.read_bytes()[-_TAIL:].decode("utf-8", "replace")
