"""Temporary part file next to an output, and errors of writing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyvips

from lowtide.core.atomic_file import create, write_error
from lowtide.core.errors import OutputError
from lowtide.media._libvips import reason


def prepare(path: Path, part: Path) -> list[Path]:
    """Create the folder of ``path`` and an empty ``part``; return the new folders.

    Raises `OutputError` if this fails or ``path`` is a folder.
    """
    if path.is_dir():
        raise OutputError(f"{path}: this is a folder", hint="give a file name in it")
    made: list[Path] = []
    try:
        missing = [folder for folder in path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
        create(part)
    except OSError as error:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # another process may use it by now
                folder.rmdir()
        raise output_error(path, error) from error
    return made


def output_error(path: Path, error: pyvips.Error | OSError) -> OutputError:
    """Convert an error of writing ``path`` to an `OutputError`."""
    if isinstance(error, pyvips.Error):
        return OutputError(f"{path}: cannot be written ({reason(error)})")
    return write_error(path, error)
