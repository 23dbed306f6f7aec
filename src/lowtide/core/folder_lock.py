"""Locks by which one job at a time writes into a folder."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowtide.core.atomic_file import open_for_append, write_error
from lowtide.core.errors import OutputError
from lowtide.core.input_file import exists

_NAME = ".lowtide-lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make ``folder``, and lock it in the block; it is removed again if nothing was put in it.

    Raises:
        OutputError: Another job holds the lock, or the folder cannot be made or written.
    """
    path = folder / _NAME
    new_folders = [one for one in (folder, *folder.parents) if not exists(one)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_locked(path)
    except OSError as error:
        raise write_error(folder, error) from error
    try:
        yield
    finally:
        with suppress(OSError):  # a file left behind locks nothing
            path.unlink()
            for one in new_folders:
                one.rmdir()  # fails, and ends the loop, if not empty
        file.close()


def open_locked(path: Path) -> io.FileIO:
    """Open and lock a file in a folder that one job at a time writes into.

    Raises:
        OutputError: Another process holds the lock.
        OSError: It cannot be opened, or is not a regular file.
    """
    while True:
        file = io.FileIO(open_for_append(path), "r+")
        try:
            _lock(file.fileno(), path)
            # The job that just ended may have replaced the file between opening and locking.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.lstat()):
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
                descriptor,
                msvcrt.LK_NBLCK,  # pyright: ignore[reportAttributeAccessIssue]
                1,
            )
        except OSError as error:
            raise _locked_error(path) from error
    except BlockingIOError as error:
        raise _locked_error(path) from error


def _locked_error(path: Path) -> OutputError:
    return OutputError(
        f"another job is writing into {path.parent}", hint="wait for it, or use another folder"
    )
