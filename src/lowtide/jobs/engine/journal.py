"""Journal of the finished files of a folder, by which a stopped job resumes.

A journal is one hidden file in the output folder. Each line is a JSON record:

    {"pin": {...}}                                  budget, costs and versions of the first run
    {"settings": hash, "values": {...}}             what the keys of files have, by name
    {"part": name}                                  about to write this temporary file
    {"begin": target, "key": ..., "replaces": ...}  about to rename a finished file to its target
    {"done": target, "key": ..., "sha256": ...}     the rename is done

``key`` joins the hashes of the input's content and of the settings. Since files get their names
by an atomic rename, a target that exists after its ``begin`` is complete, even if the process
died before writing ``done``; unless it is still the old file that was to be replaced. A temporary
file that exists when the journal is opened was left by a process that died; only those are ever
removed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from lowtide.core.atomic_file import (
    PART_PATTERN,
    append_synced,
    atomic_write,
    new_part_name,
    write_error,
)
from lowtide.core.errors import OutputError
from lowtide.core.folder_lock import open_locked
from lowtide.core.input_file import exists, file_sha256, is_file
from lowtide.core.signal import ClosedOnExit

JOURNAL_NAME = ".lowtide-journal.jsonl"


class JobJournal(ClosedOnExit):
    """Journal of one output folder, locked against a second job while open.

    With ``read_only`` it is what the file says now: nothing is locked, written or made.

    Raises:
        OutputError: Another job holds the lock, the file cannot be written, or it is a link or
            not a journal.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self._path = folder / JOURNAL_NAME
        self._new_folders = [path for path in (folder, *folder.parents) if not exists(path)]
        self.pin: dict[str, Any] = {}
        self._settings: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, dict[str, Any]] = {}
        self._begun: dict[str, dict[str, Any]] = {}
        self._done: dict[str, dict[str, Any]] = {}
        self._file = None
        try:
            if not read_only:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = open_locked(self._path)
            content = self._path.read_bytes() if self._file is None else self._file.readall()
        except OSError as error:
            raise write_error(self._path, error) from error
        try:
            # After a power cut the content may not be valid text.
            self._read(content.decode("utf-8", "replace"))
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise

    def _read(self, text: str) -> None:
        for record in filter(None, map(_record, text.splitlines())):
            self._apply(record)
        begun = text.lstrip("\0\n")  # a killed process may leave part of a line
        known = self.pin or self._parts or self._begun or self._done
        if begun and not known and not begun.startswith("{"):
            raise OutputError(
                f"{self._path} is not a journal of Lowtide",
                hint="move it away, or use another folder",
            )
        if text and not text.endswith("\n"):
            self._write("\n")  # end the cut-off line before the next record

    def _apply(self, record: dict[str, Any]) -> None:
        match record:
            case {"pin": dict() as pin}:
                self.pin = pin
            case {"settings": str() as key, "values": dict() as values}:
                self._settings[key] = values
            case {"part": str() as name} if _is_part(name):
                self._parts[name] = record
            case {"begin": str() as name, "key": str(), "replaces": list() | None}:
                self._begun[name] = record
            case {"done": str() as name, "key": str(), "sha256": str()}:
                self._done[name] = record

    def new_part(self, target: Path) -> Path:
        """Return a temporary name for ``target``, and record it.

        The record lets the next run remove the file if this process dies.
        """
        part = new_part_name(target)
        record = {"part": self._name(part)}
        self._append(record)
        self._parts[record["part"]] = record
        return part

    def remove_parts(self) -> int:
        """Delete the unfinished files that this journal names and return their count."""
        count = 0
        for name in list(self._parts):
            # A file that cannot be removed stays recorded; an invalid name does not.
            with contextlib.suppress(OSError, ValueError):
                (self.folder / name).unlink()
                count += 1
            if not os.path.lexists(self.folder / name):
                del self._parts[name]
        return count

    def set_pin(self, pin: dict[str, Any]) -> None:
        """Record what the remaining files have to be made with."""
        self._append({"pin": pin})
        self.pin = pin

    def note_settings(self, key: str, values: dict[str, Any]) -> None:
        """Record the settings that the hash ``key`` in files' keys is of."""
        if self._settings.get(key) != values:
            self._append({"settings": key, "values": values})
            self._settings[key] = values

    def settings_of(self, key: str) -> dict[str, Any] | None:
        """Return the settings of a hash, None where they were not recorded."""
        return self._settings.get(key)

    def key_of(self, target: Path) -> str:
        """Return the key with which this journal made ``target``."""
        name = self._name(target)
        return (self._done.get(name) or self._begun[name])["key"]

    @property
    def has_results(self) -> bool:
        """Whether any file of the folder was finished, with any settings."""
        return bool(self._done or self._begun)

    @property
    def models(self) -> set[str]:
        """Names of the models that files of the folder were made with."""
        found = {str(values.get("model", "")) for values in self._settings.values()}
        return {one.partition(" (")[0] for one in found} if self.has_results else set()

    def is_finished(self, target: Path, key: str) -> bool:
        """Return whether ``target`` is the complete result of ``key``, by content hash."""
        name = self._name(target)
        if not target.is_file():
            return False
        done = self._done.get(name)
        if done is not None and done["key"] == key:
            return done["sha256"] == file_sha256(target)
        begun = self._begun.get(name)
        if begun is None or begun["key"] != key or begun["replaces"] == _file_identity(target):
            return False
        with contextlib.suppress(OutputError):  # disk full: the next run records it
            self.done(target, key)
        return True

    def owns(self, target: Path) -> bool:
        """Return whether this journal made ``target``, finished or not, with any settings."""
        name = self._name(target)
        return name in self._done or name in self._begun

    def begin(self, target: Path, key: str) -> None:
        """Record that a complete file is about to be renamed to ``target``."""
        record = {"begin": self._name(target), "key": key, "replaces": _file_identity(target)}
        self._append(record)
        self._begun[record["begin"]] = record

    def done(self, target: Path, key: str) -> None:
        """Record that ``target`` is complete."""
        record = {"done": self._name(target), "key": key, "sha256": file_sha256(target)}
        self._append(record)
        self._done[record["done"]] = record

    def undo_begin(self, target: Path) -> None:
        """Undo `begin` after a failure: a file at ``target`` may not be this job's."""
        self._begun.pop(self._name(target), None)

    def close(self) -> None:
        """Rewrite the journal without superseded records, and unlock it.

        A journal without records is deleted, with the folders that were made for it.
        """
        if self._file is None or self._file.closed:
            return
        records = [{"pin": self.pin}] if self.pin else []
        open_ends = self._begun.keys() - self._done.keys()
        used = {
            one["key"].partition("-")[2] for one in (*self._done.values(), *self._begun.values())
        }
        records += [
            {"settings": key, "values": self._settings[key]}
            for key in sorted(used & self._settings.keys())
        ]
        records += [self._done[name] for name in sorted(self._done)]
        records += [self._begun[name] for name in sorted(open_ends)]
        records += [
            record for name, record in self._parts.items() if os.path.lexists(self.folder / name)
        ]
        # If the rewrite fails (disk full), the appended journal stays: longer, but complete.
        with contextlib.suppress(OSError, OutputError):
            self._rewrite(records)
        self._file.close()

    def _rewrite(self, records: list[dict[str, Any]]) -> None:
        if not records:
            self._path.unlink()
            for folder in self._new_folders:
                folder.rmdir()  # fails, and ends the loop, if not empty
            return
        with atomic_write(self._path, self.new_part(self._path)) as part:
            part.write_text("".join(json.dumps(record) + "\n" for record in records))

    def _append(self, record: dict[str, Any]) -> None:
        self._write(json.dumps(record) + "\n")

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            append_synced(self._file.fileno(), text)
        except OSError as error:
            raise write_error(self._path, error) from error

    def _name(self, target: Path) -> str:
        return target.relative_to(self.folder).as_posix()


@contextlib.contextmanager
def open_journal(folder: Path | None, *, read_only: bool = False) -> Iterator[JobJournal | None]:
    """Open the journal of ``folder``, without what killed runs left; None for no folder.

    With ``read_only`` nothing is changed, and a folder without a journal has None.
    """
    if folder is None or (read_only and not is_file(folder / JOURNAL_NAME)):
        yield None
        return
    if read_only:
        yield JobJournal(folder, read_only=True)
        return
    with JobJournal(folder) as journal:
        journal.remove_parts()
        try:
            yield journal
        finally:
            journal.remove_parts()  # of workers that were ended, or of a stop between two steps


def _record(line: str) -> dict[str, Any] | None:
    """Parse one line, or return None for one cut off by a killed process."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_part(name: str) -> bool:
    """Return whether ``name`` has the form of a temporary file in or below the folder."""
    path = PurePath(name)
    inside = not path.is_absolute() and not path.drive and ".." not in path.parts
    return inside and fnmatch.fnmatchcase(path.name, PART_PATTERN)


def _file_identity(target: Path) -> list[int] | None:
    """Return what distinguishes the file from one that replaces it; None if absent."""
    try:
        facts = target.lstat()
    except FileNotFoundError:
        return None
    return [facts.st_ino, facts.st_size, facts.st_mtime_ns]
