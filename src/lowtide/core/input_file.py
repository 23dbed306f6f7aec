"""What may be an input: a regular file, or a link to one; and its hash.

Everything that a user names for reading is asked for here before anything opens it. A FIFO would
wait without end for somebody to write, and a device may give bytes without end.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from lowtide.core.errors import InputError, LowtideError


def require_input(
    path: Path, error: type[LowtideError] = InputError, *, hint: str | None = None
) -> os.stat_result:
    """Return the status of a file that may be read; it is not opened.

    Raises:
        LowtideError: ``error``, with ``hint`` where the file is not there: there is none, it is a
            folder, a FIFO, a socket or a device, or its name is no text.
    """
    if not is_text(path):
        raise error(f"{str(path)!r}: a name that is not valid text", hint="rename the file")
    try:
        facts = path.stat()
    except FileNotFoundError as found:
        raise error(f"{path}: no such file", hint=hint) from found
    except PermissionError as found:
        raise error(f"{path}: no permission to read this file") from found
    except (OSError, ValueError) as found:
        reason = getattr(found, "strerror", None) or found
        raise error(f"{path}: cannot be read ({reason})") from found
    if stat.S_ISDIR(facts.st_mode):
        raise error(f"{path}: this is a folder, not a file", hint="name one file in it")
    if not stat.S_ISREG(facts.st_mode):
        raise error(f"{path}: not a regular file", hint="save what it gives in a file, and name it")
    return facts


def expand_home(path: Path, error: type[LowtideError] = InputError) -> Path:
    """Return a path with a leading ``~`` replaced; raises ``error`` where there is no such home."""
    try:
        return path.expanduser()
    except RuntimeError as found:
        raise error(f"{path}: no such file: there is no such user, or no home") from found


def is_text(path: Path) -> bool:
    """Return whether a name can be written as UTF-8, as reports and most libraries need."""
    try:
        return b"\0" not in str(path).encode()
    except UnicodeEncodeError:
        return False


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; of one that cannot be looked at, whatever it is, no."""
    return os.path.isdir(path)  # noqa: PTH112  (`Path.is_dir` raises for names that are too long)


def exists(path: Path) -> bool:
    """Return whether anything but a broken link has this name, as far as can be seen."""
    return os.path.exists(path)  # noqa: PTH110  (as `is_folder`)


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file or a link to one, as far as can be seen."""
    return os.path.isfile(path)  # noqa: PTH113  (as `is_folder`)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
