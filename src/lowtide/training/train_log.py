"""Training log as JSON lines, and optionally TensorBoard scalars."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowtide.core.atomic_file import append, open_own, remove_unfinished, write_error, writing
from lowtide.core.errors import UsageError

_NAME = "log.jsonl"


class TrainLog:
    """Writer of ``log.jsonl`` in ``folder``, one JSON row per entry.

    Each row has its ``step``. A run that resumes after ``done`` steps drops the rows that an
    interrupted one wrote beyond them, and rows torn by a power cut. With ``tensorboard`` int and
    float values are also written as scalars.

    Raises:
        OutputError: If nothing can be written, or the log is a link or not a file.
        UsageError: If ``tensorboard`` is set and TensorBoard is missing.
    """

    def __init__(self, folder: Path, done: int, *, tensorboard: bool = False) -> None:
        self._path = folder / _NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.close(open_own(self._path))
            _cut_back(self._path, done)
            self._curves = _writer(folder, done) if tensorboard else None
            self._file = open_own(self._path)
        except OSError as error:
            raise write_error(self._path, error) from error

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Append a row, at once on disk; if `OutputError` is raised, nothing of it is."""
        try:
            append(self._file, json.dumps({"step": step, **values}) + "\n")
            if self._curves is not None:
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self._curves.add_scalar(name, value, step)
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        """Close the log and flush TensorBoard."""
        os.close(self._file)
        if self._curves is not None:
            self._curves.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the rows so far, without rows torn by a power cut."""
    path = folder / _NAME
    return [row for _, row in _rows(path.read_bytes())] if path.is_file() else []


def _rows(text: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each valid line with its parsed row."""
    for line in text.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:  # of JSON, or of UTF-8
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row


def _cut_back(path: Path, done: int) -> None:
    """Atomically rewrite the log with only the rows of the first ``done`` steps."""
    remove_unfinished(path)
    text = path.read_bytes()
    kept = b"".join(line + b"\n" for line, row in _rows(text) if row["step"] <= done)
    if kept != text:
        with writing(path) as part:
            part.write_bytes(kept)


def _writer(folder: Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "logger.use_tb_logger needs TensorBoard", hint="pip install 'lowtide[train]'"
        ) from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
