"""Training log as JSON lines, and optionally TensorBoard scalars."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowtide.core.atomic_file import (
    append_synced,
    atomic_output,
    open_for_append,
    remove_part_files,
    write_error,
)
from lowtide.core.errors import UsageError, install_extra

_LOG_NAME = "log.jsonl"


class TrainLog:
    """Writer of ``log.jsonl`` in ``folder``, one JSON row per entry.

    Each row has its ``step``. A run that resumes after ``completed_steps`` steps drops the rows
    that an interrupted one wrote beyond them, and rows torn by a power cut. With ``tensorboard``
    int and float values are also written as scalars.

    Raises:
        OutputError: If nothing can be written, or the log is a link or not a file.
        UsageError: If ``tensorboard`` is set and TensorBoard is missing.
    """

    def __init__(self, folder: Path, completed_steps: int, *, tensorboard: bool = False) -> None:
        self._path = folder / _LOG_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.close(open_for_append(self._path))
            _truncate_log(self._path, completed_steps)
            self._tensorboard = _summary_writer(folder, completed_steps) if tensorboard else None
            self._file = open_for_append(self._path)
        except OSError as error:
            raise write_error(self._path, error) from error

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Append a row, at once on disk; if `OutputError` is raised, nothing of it is."""
        try:
            append_synced(self._file, json.dumps({"step": step, **values}) + "\n")
            if self._tensorboard is not None:
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self._tensorboard.add_scalar(name, value, step)
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        """Close the log and flush TensorBoard."""
        os.close(self._file)
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the rows so far, without rows torn by a power cut."""
    path = folder / _LOG_NAME
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


def _truncate_log(path: Path, completed_steps: int) -> None:
    """Atomically truncate the log to the rows of ``completed_steps`` steps."""
    remove_part_files(path)
    text = path.read_bytes()
    kept = b"".join(line + b"\n" for line, row in _rows(text) if row["step"] <= completed_steps)
    if kept != text:
        with atomic_output(path) as part:
            part.write_bytes(kept)


def _summary_writer(folder: Path, completed_steps: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "logger.use_tb_logger needs TensorBoard", hint=install_extra("train")
        ) from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=completed_steps + 1)
