"""Temporary part file next to an output, and errors of writing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyvips

from lowtide.core.atomic_file import create_new_file, write_error
from lowtide.core.errors import OutputError
from lowtide.media._libvips import error_text


def prepare_part_file(path: Path, part: Path) -> list[Path]:
    """Create the folder of ``path`` and an empty ``part``; return the new folders.

    Raises `OutputError` if this fails or ``path`` is a folder.
    """
    if path.is_dir():
        raise OutputError(f"{path}: this is a folder", hint="give a file name in it")
    created: list[Path] = []
    try:
        missing = [folder for folder in path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            created.append(folder)
        create_new_file(part)
    except OSError as error:
        for folder in reversed(created):
            with contextlib.suppress(OSError):  # another process may use it by now
                folder.rmdir()
        raise output_error(path, error) from error
    return created


def output_error(path: Path, error: pyvips.Error | OSError) -> OutputError:
    """Convert an error of writing ``path`` to an `OutputError`."""
    if isinstance(error, pyvips.Error):
        return OutputError(f"{path}: cannot be written ({error_text(error)})")
    return write_error(path, error)
