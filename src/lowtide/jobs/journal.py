"""Which files of a folder are finished, so that a stopped job goes on where it was.

A journal is one hidden file in the output folder. Each line is a JSON record:

    {"pin": {...}}                                  budget, costs and versions of the first run
    {"begin": target, "key": ..., "replaces": ...}  about to give a finished file its name
    {"done": target, "key": ..., "sha256": ...}     that file has its name

``key`` joins the hashes of the input's content and of the settings. Since files get their names
by an atomic rename, a target that exists after its ``begin`` is complete, even if the process
died before writing ``done``; unless it is still the old file that it was to replace.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, TextIO

from lowtide.core.errors import OutputError
from lowtide.core.hashing import file_sha256
from lowtide.core.part_file import PART_PATTERN, replacing

JOURNAL_NAME = ".lowtide-journal.jsonl"


class Journal:
    """The journal of one output folder, locked against a second job while open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / JOURNAL_NAME
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(self._path)
        except OSError as error:
            raise _unwritable(folder, error) from error
        self.pin: dict[str, Any] = {}
        self._begun: dict[str, dict[str, Any]] = {}
        self._done: dict[str, dict[str, Any]] = {}
        self._read()

    def _read(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        if text and not text.endswith("\n"):
            self._file.write("\n")  # or the next record would join what was cut off
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a process that was killed while writing it
            if not isinstance(record, dict):
                continue
            if "pin" in record:
                self.pin = record["pin"]
            elif "begin" in record:
                self._begun[record["begin"]] = record
            elif "done" in record:
                self._done[record["done"]] = record

    def remove_parts(self) -> int:
        """Delete what killed runs left unfinished in this folder; returns how many files."""
        parts = [path for path in self.folder.rglob(PART_PATTERN) if path.is_file()]
        for path in parts:
            path.unlink()
        return len(parts)

    def set_pin(self, pin: dict[str, Any]) -> None:
        """Record what the remaining files must be made with."""
        self.pin = pin
        self._append({"pin": pin})

    def finished(self, target: Path, key: str) -> bool:
        """Whether ``target`` is the complete result of ``key``; checked by its content."""
        name = self._name(target)
        if not target.is_file():
            return False
        done = self._done.get(name)
        if done is not None and done["key"] == key:
            return done["sha256"] == file_sha256(target)
        begun = self._begun.get(name)
        if begun is None or begun["key"] != key or begun["replaces"] == _identity(target):
            return False
        self.done(target, key)
        return True

    def owns(self, target: Path) -> bool:
        """Whether this journal made ``target``, finished or not, with whatever settings."""
        name = self._name(target)
        return name in self._done or name in self._begun

    def begin(self, target: Path, key: str) -> None:
        """Note that ``target`` is about to get its name."""
        record = {"begin": self._name(target), "key": key, "replaces": _identity(target)}
        self._begun[record["begin"]] = record
        self._append(record)

    def done(self, target: Path, key: str) -> None:
        """Note that ``target`` is complete."""
        record = {"done": self._name(target), "key": key, "sha256": file_sha256(target)}
        self._done[record["done"]] = record
        self._append(record)

    def forget(self, target: Path) -> None:
        """Take back `begin`: the file could not be finished, and what may lie there is not ours."""
        self._begun.pop(self._name(target), None)

    def close(self) -> None:
        """Rewrite the journal without what is superseded, and unlock it.

        A journal without records goes, and so do the folders that were made for it.
        """
        if self._file.closed:
            return
        records = [{"pin": self.pin}] if self.pin else []
        records += [self._done[name] for name in sorted(self._done)]
        open_ends = self._begun.keys() - self._done.keys()
        records += [self._begun[name] for name in sorted(open_ends)]
        # What cannot be rewritten (a full disk) stays as it was appended: longer, as complete.
        with contextlib.suppress(OSError):
            self._rewrite(records)
        self._file.close()

    def _rewrite(self, records: list[dict[str, Any]]) -> None:
        if not records:
            self._path.unlink()
            for folder in self._made:
                folder.rmdir()  # fails, and ends this, where something lies in it by now
            return
        with replacing(self._path) as part:
            part.write_text("".join(json.dumps(record) + "\n" for record in records))

    def _append(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def _name(self, target: Path) -> str:
        return target.relative_to(self.folder).as_posix()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _identity(target: Path) -> list[int] | None:
    """What tells an old file from the one that replaces it; None if there is none."""
    if not target.exists():
        return None
    facts = target.stat()
    return [facts.st_ino, facts.st_size, facts.st_mtime_ns]


def _open_locked(path: Path) -> TextIO:
    """The journal, open and locked; `OutputError` while another process has it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _lock(file.fileno(), path)
            # The job that just ended may have replaced the file between the two calls above.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ModuleNotFoundError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(  # pyright: ignore[reportAttributeAccessIssue]
                descriptor, msvcrt.LK_NBLCK, 1  # pyright: ignore[reportAttributeAccessIssue]
            )
        except OSError as error:
            raise _busy(path) from error
    except BlockingIOError as error:
        raise _busy(path) from error


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{path}: cannot be written ({error.strerror})")


def _busy(path: Path) -> OutputError:
    return OutputError(
        f"another job is writing into {path.parent}", hint="wait for it, or use another folder"
    )
