"""The unfinished file next to an output, and what goes wrong with files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyvips

from lowtide.core.errors import OutputError
from lowtide.media._libvips import reason

_FULL_DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EFBIG: "the disk is full (largest file size reached)",
    getattr(errno, "EDQUOT", errno.ENOSPC): "the disk is full (quota reached)",
}
_PROBE_BYTES = 1 << 20


def prepare(path: Path, part: Path) -> list[Path]:
    """Make the folder of ``path`` and an empty ``part``; returns the folders that are new.

    Raises `OutputError` when that is not possible, or ``path`` is a folder.
    """
    if path.is_dir():
        raise OutputError(f"{path}: this is a folder", hint="give a file name in it")
    made: list[Path] = []
    try:
        missing = [folder for folder in path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
        part.open("wb").close()
    except OSError as error:
        for folder in reversed(made):
            folder.rmdir()
        raise output_error(path, error) from error
    return made


def disk_error(part: Path) -> OSError | None:
    """Why nothing more can be written to ``part``, which libvips does not tell; None if it can."""
    try:
        with part.open("ab", buffering=0) as file:
            # One call may write a part of it, up to the last free byte.
            for _ in range(2):
                file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return error
    return None


def output_error(path: Path, error: pyvips.Error | OSError) -> OutputError:
    """The error to raise when ``error`` kept ``path`` from being written."""
    if isinstance(error, pyvips.Error):
        return OutputError(f"{path}: cannot be written ({reason(error)})")
    text = error.strerror or str(error)
    if error.errno in _FULL_DISK:
        return OutputError(
            f"{path}: {_FULL_DISK[error.errno]} ({text})",
            hint="free some space or write to another disk",
        )
    return OutputError(f"{path}: cannot be written ({text})")


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
