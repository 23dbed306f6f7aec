"""What a run tells while it goes on: lines of JSON, and curves for TensorBoard where wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowtide.core.errors import UsageError


class Log:
    """Rows of ``log.jsonl`` in ``folder``, each with its ``step``.

    A run that goes on after ``done`` steps drops what an interrupted one had written beyond them.
    """

    def __init__(self, folder: Path, done: int, *, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "log.jsonl"
        rows = read_log(folder)
        kept = [row for row in rows if row["step"] <= done]
        if len(kept) < len(rows):
            self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._curves = _writer(folder, done) if tensorboard else None

    def add(self, step: int, values: dict[str, Any]) -> None:
        """A row, on disk at once."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._curves is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._curves.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what TensorBoard still holds back."""
        if self._curves is not None:
            self._curves.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows so far; the last one may have been cut short and is then left out."""
    path, rows = folder / "log.jsonl", []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def _writer(folder: Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "logger.use_tb_logger needs TensorBoard", hint="pip install 'lowtide[train]'"
        ) from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
