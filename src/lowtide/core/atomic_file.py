"""Files that appear whole or not at all: written beside their place, then renamed.

Nothing that lies there already is ever opened for writing: whatever is made is a new file, so
that no link leads elsewhere and no file of anybody else's is changed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowtide.core.errors import LowtideError, OutputError

# Names of what a killed run left unfinished: hidden, so that no folder's images count them.
PART_PATTERN = ".*.lowtide.part"
SPACE_HINT = "free some space or write to another disk"
_FULL_DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EFBIG: "the disk is full (largest file size reached)",
    getattr(errno, "EDQUOT", errno.ENOSPC): "the disk is full (quota reached)",
}
_HINTS = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "name a file in a folder that exists"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "name a folder that you may write to"
    ),
    errno.ELOOP: "move the link away, or use another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_PROBE_BYTES = 1 << 20
# Letters of a name that part files repeat: names have 255 bytes at most, and letters up to four.
_LONGEST = 50


def part_path(path: Path) -> Path:
    """``path`` as a part file is called: hidden, and with an ending of its own."""
    return path.with_name(f".{path.name}.lowtide.part")


def new_part_name(path: Path) -> Path:
    """A name beside ``path`` under which nobody else's file lies, for a file that will be there."""
    return part_path(path.with_name(f"{secrets.token_hex(8)}.{path.name[-_LONGEST:]}"))


def unfinished(path: Path) -> list[Path]:
    """What killed runs left of ``path``, by `new_part_name`; others may be writing theirs."""
    name = re.compile(rf"\.[0-9a-f]{{16}}\.{re.escape(path.name[-_LONGEST:])}\.lowtide\.part")
    found = path.parent.glob(PART_PATTERN)
    return sorted(part for part in found if name.fullmatch(part.name))


def remove_unfinished(path: Path) -> None:
    """Remove what killed runs left of ``path``, in a folder where one run writes at a time."""
    for part in unfinished(path):
        with suppress(OSError):  # it is in nobody's way
            part.unlink()


def create(path: Path) -> None:
    """Make an empty file; OSError where anything has that name, a link to nowhere included."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(path, flags, 0o666))


@contextmanager
def atomic_write(path: Path, part: Path | None = None) -> Iterator[Path]:
    """A new empty file beside ``path``, which is renamed to ``path`` when the block ends; ``part``
    is its name, by default a random one.

    If the block raises, or is killed, what was at ``path`` stays; what the block wrote is removed
    where it raised. A link at ``path`` is replaced, not what it leads to. Errors pass, those of
    making and renaming too; `writing` turns them into the one to raise.
    """
    part = part or new_part_name(path)
    create(part)
    try:
        yield part
        sync(part)  # or a power cut might leave the name without the bytes
        part.replace(path)
    except BaseException:
        with suppress(OSError):  # the error that led here says more
            part.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path, part: Path | None = None) -> Iterator[Path]:
    """`atomic_write` that raises `OutputError` for whatever kept ``path`` from being written.

    What libraries raise on a full disk need not say so: then the disk is asked.
    """
    try:
        with atomic_write(path, part) as made:
            try:
                yield made
            except (OSError, LowtideError):
                raise
            except Exception as error:
                if (full := disk_error(made)) is not None:
                    raise full from error
                raise
    except OSError as error:
        raise write_error(path, error) from error


def make_folder(folder: Path) -> None:
    """Make ``folder``, and those that it is to lie in; raises `OutputError` where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error


def write_error(path: Path, error: OSError) -> OutputError:
    """The error to raise when ``error`` kept ``path`` from being written: space, or something
    else."""
    text = error.strerror or str(error)
    if is_lack_of_space(error):
        return OutputError(f"{path}: {_FULL_DISK[error.errno or 0]} ({text})", hint=SPACE_HINT)
    hint = _HINTS.get(error.errno or 0)
    return OutputError(f"{path}: cannot be written ({text})", hint=hint)


def is_lack_of_space(error: OSError) -> bool:
    """Whether the disk, a quota or the largest size of a file was reached."""
    return error.errno in _FULL_DISK


def disk_error(part: Path) -> OSError | None:
    """Why nothing more can be written to ``part``, where a library does not tell; None if it
    can."""
    try:
        with part.open("ab", buffering=0) as file:
            # One call may write a part of it, up to the last free byte.
            for _ in range(2):
                file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return error
    return None


def open_own(path: Path) -> int:
    """A descriptor to read ``path`` and to append to it; the file is made where there is none.

    Raises OSError where that is a link, or no file: a pipe would be waited for without end. A
    file that has a second name is copied first, so that nothing is changed under the other.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, which is not followed")
    descriptor = os.open(path, flags, 0o666)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file")
    if facts.st_nlink > 1:
        os.close(descriptor)
        with atomic_write(path) as part:
            part.write_bytes(path.read_bytes())
        return open_own(path)
    return descriptor


def append(descriptor: int, text: str) -> None:
    """Write all of ``text`` at the end of what `open_own` opened, onto the disk; or nothing of it,
    where OSError is raised."""
    before, data = os.fstat(descriptor).st_size, memoryview(text.encode())
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):  # the error that led here says more
            os.ftruncate(descriptor, before)
        raise


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
