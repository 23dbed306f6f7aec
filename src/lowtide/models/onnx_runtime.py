"""ONNX Runtime: package checks, errors and sessions. No PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from lowtide.core.errors import LowtideError, UsageError, install_extra

# onnxruntime has no base class of its errors, which derive from Exception.
_REFUSALS = """
    NotImplemented Fail InvalidGraph InvalidProtobuf InvalidArgument RuntimeException EPFail
    NoSuchFile ModelRequiresCompilation
""".split()
# Error codes and source locations in its messages.
_NOISE = re.compile(
    r"^Error in execution: |\[ONNXRuntimeError\] : \d+ : \w+ : "
    r"|Exception during initialization: |Load model from .*? failed: ?|/\S+:\d+ .*?\) (?=[A-Z\[])"
)
# Log level "fatal": errors are raised as well.
LOG_FATAL = 4
_OUT_OF_MEMORY = "Failed to allocate memory", "bad_alloc"


ONE_SIZE = "a file exported at one size runs at no other: export it again with dynamic shapes"


class CannotRunError(LowtideError):
    """ONNX Runtime cannot run the file: it lacks an operator, or it failed."""


def require_packages(*names: str, what: str = "exporting to ONNX") -> None:
    """Raise `UsageError` with the first of these packages that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"{what} needs {name}", hint=install_extra("export"))


def load_runtime() -> None:
    """Import onnx and onnxruntime; raises `UsageError` where one is missing."""
    require_packages("onnx", "onnxruntime", what="running ONNX files")
    for name in ("onnx", "onnxruntime"):
        importlib.import_module(name)


def runtime_errors() -> tuple[type[Exception], ...]:
    """Return the exception types of ONNX Runtime, and UnicodeDecodeError.

    Python raises the latter for names that are not UTF-8.
    """
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    known = (getattr(state, name) for name in _REFUSALS if hasattr(state, name))
    return (*known, UnicodeDecodeError)


def short_reason(error: Exception) -> str:
    """Return the first line of an error, without error codes and source locations."""
    return _NOISE.sub("", str(error).strip().partition("\n")[0])


def open_session(path: Path | str, threads: int, *, memory_patterns: bool = False) -> Any:
    """Open an `onnxruntime.InferenceSession` with ``threads`` threads on the CPU.

    Args:
        memory_patterns: Whether to record memory patterns, which are kept for every input size.

    Raises `CannotRunError` where the runtime refuses the file, and `MemoryError`.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = LOG_FATAL
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = memory_patterns
    # Spinning threads would count as processor time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except runtime_errors() as error:
        raise convert_error(error) from error


def convert_error(error: Exception, where: str = "") -> Exception:
    """Convert a runtime error to a one-line `CannotRunError`, or to MemoryError.

    ``where`` is the size of the image of a run that failed.
    """
    if any(words in str(error) for words in _OUT_OF_MEMORY):
        return MemoryError(f"ONNX Runtime: {short_reason(error)}")
    return CannotRunError(where + short_reason(error), hint=ONE_SIZE if where else None)
