"""What a run tells while it goes on: lines of JSON, and curves for TensorBoard where wanted."""

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
    """Rows of ``log.jsonl`` in ``folder``, each with its ``step``.

    A run that goes on after ``done`` steps drops what an interrupted one had written beyond them,
    and all that is no whole row, as a power cut leaves it. Raises `OutputError` where nothing can
    be written, and where the log is a link or no file.
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
        """A row, on disk at once, or nothing of it where `OutputError` is raised."""
        try:
            append(self._file, json.dumps({"step": step, **values}) + "\n")
            if self._curves is not None:
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self._curves.add_scalar(name, value, step)
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        """Write what TensorBoard still holds back."""
        os.close(self._file)
        if self._curves is not None:
            self._curves.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows so far, without what is no whole row: a power cut may have torn one."""
    path = folder / _NAME
    return [row for _, row in _rows(path.read_bytes())] if path.is_file() else []


def _rows(text: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines that are rows, and what they say."""
    for line in text.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:  # of JSON, or of UTF-8
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row


def _cut_back(path: Path, done: int) -> None:
    """Leave the rows of ``done`` steps, as they were written, in place of all at once."""
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
