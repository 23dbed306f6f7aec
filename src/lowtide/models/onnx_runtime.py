"""ONNX Runtime itself: its packages, its errors, and a session of it. No PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from lowtide.core.errors import LowtideError, UsageError
from lowtide.models.onnx_providers import CPU, Provider

# onnxruntime has no base class of its errors, which derive from Exception.
_REFUSALS = (
    "NotImplemented",
    "Fail",
    "InvalidGraph",
    "InvalidProtobuf",
    "InvalidArgument",
    "RuntimeException",
    "EPFail",
    "NoSuchFile",
    "ModelRequiresCompilation",
)
# Its numbers of kinds of errors, and the places in its sources.
_NOISE = re.compile(
    r"^Error in execution: |\[ONNXRuntimeError\] : \d+ : \w+ : "
    r"|Exception during initialization: |Load model from .*? failed: ?|/\S+:\d+ .*?\) (?=[A-Z\[])"
)
# What matters is raised too.
SILENT = 4
_LACKS = "Failed to allocate memory", "bad_alloc"


class CannotRunError(LowtideError):
    """ONNX Runtime cannot run the file: it lacks an operator, or it failed."""


def require_packages(*names: str, what: str = "exporting to ONNX") -> None:
    """Raise `UsageError` naming the first of these packages that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"{what} needs {name}", hint="pip install 'lowtide[export]'")


def load_runtime() -> None:
    """Import what ONNX files are read and run with. Raises `UsageError` where it is missing."""
    require_packages("onnx", "onnxruntime", what="running ONNX files")
    for name in ("onnx", "onnxruntime"):
        importlib.import_module(name)


def runtime_errors() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises of its own accord; in names that are no UTF-8, Python does."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    known = (getattr(state, name) for name in _REFUSALS if hasattr(state, name))
    return (*known, UnicodeDecodeError)


def short_reason(error: Exception) -> str:
    """The first line of an error, without the runtime's name, numbers and places."""
    return _NOISE.sub("", str(error).strip().partition("\n")[0])


def open_session(
    path: Path | str, threads: int, *, patterns: bool = False, provider: Provider = CPU
) -> Any:
    """An `onnxruntime.InferenceSession` with so many threads on the CPU.

    ``patterns`` remembers for each size where blocks lay, and holds them for all of them. Raises
    `CannotRunError` where the runtime refuses the file or cannot set the provider up, and
    `MemoryError`.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = SILENT
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = patterns
    # Threads that wait in a loop would count as processor time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=provider.chain)
    except runtime_errors() as error:
        raise as_failure(error) from error
    if provider.first not in session.get_providers():
        # The runtime goes on with what is left, and says so in its log alone.
        raise CannotRunError(
            f"{provider.first} could not be set up: a library of its own is missing"
        )
    return session


def as_failure(error: Exception, where: str = "") -> Exception:
    """As an error that says it in one line; a lack of memory is one that Python knows."""
    if any(words in str(error) for words in _LACKS):
        return MemoryError(f"ONNX Runtime: {short_reason(error)}")
    return CannotRunError(where + short_reason(error))
