"""What may become an output, and atomic writes: a part file that gets its name when complete.

No existing file is ever opened for writing: what is written is a new file, so that no link is
followed and no file of anybody else is changed. What is replaced is a regular file, or a link to
one: never a device, a FIFO or a socket.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowtide.core.errors import LowtideError, OutputError, UsageError
from lowtide.core.input_file import is_folder, is_text

# Names of part files that killed runs left: hidden, so that they do not count as images.
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
# Letters of a name that part files repeat: names have 255 bytes at most, letters up to four.
_LONGEST = 50
_MOST_NAME_BYTES = 255


def part_path(path: Path) -> Path:
    """Return the part-file name of ``path``: hidden, ending in ``.lowtide.part``."""
    return path.with_name(f".{path.name}.lowtide.part")


def new_part_name(path: Path) -> Path:
    """Return a random, unused part-file name in the folder of ``path``."""
    return part_path(path.with_name(f"{secrets.token_hex(8)}.{path.name[-_LONGEST:]}"))


def find_part_files(path: Path) -> list[Path]:
    """List part files named by `new_part_name` for ``path``, in sorted order.

    Killed runs left them, or other runs may be writing them now.
    """
    name = re.compile(rf"\.[0-9a-f]{{16}}\.{re.escape(path.name[-_LONGEST:])}\.lowtide\.part")
    found = path.parent.glob(PART_PATTERN)
    return sorted(part for part in found if name.fullmatch(part.name))


def remove_part_files(path: Path) -> None:
    """Remove part files that killed runs left of ``path``.

    For a folder in which one run writes at a time.
    """
    for part in find_part_files(path):
        with suppress(OSError):  # a file left behind does no harm
            part.unlink()


def create_new_file(path: Path) -> None:
    """Create an empty file.

    Raises:
        OSError: if anything has that name, a dangling link included.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(path, flags, 0o666))


def prepare_part_file(path: Path, part: Path) -> list[Path]:
    """Create the folder of ``path`` and an empty ``part``; return the new folders.

    Raises `OutputError` if this fails or ``path`` is a folder.
    """
    require_replaceable(path)
    created: list[Path] = []
    try:
        missing = [folder for folder in path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            created.append(folder)
        create_new_file(part)
    except OSError as error:
        for folder in reversed(created):
            with suppress(OSError):  # another process may use it by now
                folder.rmdir()
        raise write_error(path, error) from error
    return created


@contextmanager
def atomic_write(path: Path, part: Path | None = None, *, replace: bool = True) -> Iterator[Path]:
    """Write ``path`` atomically: yields a new part file, which gets its name at the end.

    ``part`` is its name, by default a random one. If the block raises, or is killed, the old file
    at ``path`` stays; what was written is removed if it raised. Unless ``replace``, a file that
    appeared meanwhile stays too. Errors propagate unchanged, those of creating and renaming too;
    `atomic_output` converts them.

    Raises:
        OutputError: as `put_in_place`.
    """
    part = part or new_part_name(path)
    create_new_file(part)
    mode = part.stat().st_mode
    try:
        yield part
        if part.stat().st_mode != mode:  # some libraries put a file of their own in its place
            part.chmod(mode)
        sync_to_disk(part)  # or a power cut might leave the name without the bytes
        put_in_place(part, path, replace=replace)
    except BaseException:
        with suppress(OSError):  # the error that led here says more
            part.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_output(path: Path, part: Path | None = None, *, replace: bool = True) -> Iterator[Path]:
    """`atomic_write` that raises `OutputError` for every failure to write ``path``.

    Other libraries may not report a full disk as such: then the disk is probed.
    """
    require_replaceable(path)  # before the block, which may be hours of work
    try:
        with atomic_write(path, part, replace=replace) as made:
            try:
                yield made
            except (OSError, LowtideError):
                raise
            except Exception as error:
                if (full := probe_disk_error(made)) is not None:
                    raise full from error
                raise
    except OSError as error:
        raise write_error(path, error) from error


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents.

    Raises:
        OutputError: if that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error


def put_in_place(part: Path, path: Path, *, replace: bool) -> None:
    """Give a complete file its name; a link at ``path`` is replaced, not its target.

    Raises:
        OutputError: ``path`` is no regular file, or exists and ``replace`` is not set.
        OSError: it cannot be renamed.
    """
    if replace:
        _require_regular(path)
        part.replace(path)
        return
    try:
        os.link(part, path)  # unlike a rename it fails where anything has the name
    except FileExistsError as error:
        raise _appeared_error(path) from error
    except OSError as error:  # this file system has no second names
        if os.path.lexists(path):
            raise _appeared_error(path) from error
        part.replace(path)
    else:
        part.unlink()


def _appeared_error(path: Path) -> OutputError:
    return OutputError(
        f"{path}: made by another program during the run",
        hint="--force to replace it, or another name",
    )


def require_name(output: str | Path) -> None:
    """Raise `UsageError` for an output without a name, as an unset variable gives."""
    if not os.fspath(output):
        raise UsageError("the output has no name", hint="-o FILE, or -o FOLDER")


def require_output(path: Path, *, force: bool, makes_folder: bool = False) -> None:
    """Refuse what cannot become an output, before any work; nothing is written.

    Args:
        path: The file.
        force: Whether a file of that name may be replaced.
        makes_folder: Whether missing folders will be made.

    Raises:
        UsageError: Something has that name and may not be replaced, or the name is no text.
        OutputError: It is a folder or no regular file, the name is too long, or the folder is
            missing or cannot be written.
    """
    _require_usable_name(path)
    require_replaceable(path)
    if not force and os.path.lexists(path):  # lexists: a broken link belongs to somebody too
        raise UsageError(f"{path} already exists", hint="--force to replace it")
    folder, wrong = path.parent, 0
    while makes_folder and not os.path.lexists(folder):
        folder = folder.parent
    if not is_folder(folder):
        wrong = errno.ENOTDIR if os.path.lexists(folder) else errno.ENOENT
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = errno.EACCES
    if wrong:
        raise write_error(path, OSError(wrong, os.strerror(wrong)))


def require_output_folder(folder: Path) -> None:
    """Refuse what cannot become a folder of outputs; raises as `require_output`."""
    _require_usable_name(folder)
    if os.path.lexists(folder) and not is_folder(folder):
        raise OutputError(f"{folder}: cannot be written (not a folder)", hint="choose another name")


def _require_usable_name(path: Path) -> None:
    if not is_text(path):
        raise UsageError(f"{str(path)!r}: a name that is not valid text", hint="choose another")
    if max(map(len, map(os.fsencode, path.parts)), default=0) > _MOST_NAME_BYTES:
        raise write_error(path, OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)))


def require_replaceable(path: Path) -> None:
    """Raise `OutputError` where ``path`` is neither absent, a regular file nor a link to one."""
    if is_folder(path):
        raise OutputError(f"{path}: this is a folder", hint="give a file name in it")
    _require_regular(path)


def _require_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:  # there is nothing, or a link to nothing; what else is wrong, writing will say
        return
    # Links such as /dev/stdout are the machine's, also while they lead to a regular file.
    special = not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    if special or os.path.realpath(path.parent) == "/dev":
        raise OutputError(
            f"{path}: not a regular file, and only such are replaced", hint="choose another name"
        )


def require_distinct(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Raise `UsageError` where an output is an input, or two outputs are one file."""
    taken = {file_key(path): f"the input {path}" for path in inputs}
    for path in outputs:
        if other := taken.get(file_key(path)):
            raise UsageError(f"{path}: this output is {other}", hint="choose another name")
        taken[file_key(path)] = f"the output {path}"


def file_key(path: Path) -> str:
    """Return what is equal for names of one file.

    It is without case: on some file systems names that differ in case are the same file.
    """
    return str(path.resolve()).casefold()


def write_error(path: Path, error: OSError) -> OutputError:
    """Return the `OutputError` for an OSError in writing ``path``, with a hint."""
    text = error.strerror or str(error)
    if is_disk_full(error):
        return OutputError(f"{path}: {_FULL_DISK[error.errno or 0]} ({text})", hint=SPACE_HINT)
    hint = _HINTS.get(error.errno or 0)
    return OutputError(f"{path}: cannot be written ({text})", hint=hint)


def is_disk_full(error: OSError) -> bool:
    """Return whether ``error`` is a full disk, quota or file-size limit."""
    return error.errno in _FULL_DISK


def probe_disk_error(part: Path) -> OSError | None:
    """Return the OSError of writing more to ``part``, or None if that works.

    For libraries that do not report why a write failed.
    """
    try:
        with part.open("ab", buffering=0) as file:
            # One call may write only a part, up to the last free byte.
            for _ in range(2):
                file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return error
    return None


def open_for_append(path: Path) -> int:
    """Open or create ``path`` for reading and appending; returns a descriptor.

    A file with a second hard link is copied first, so that the other is unchanged.

    Raises:
        OSError: for a link, or for what is not a regular file: a pipe would block without end.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed")
    descriptor = os.open(path, flags, 0o666)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    if facts.st_nlink > 1:
        os.close(descriptor)
        with atomic_write(path) as part:
            part.write_bytes(path.read_bytes())
        return open_for_append(path)
    return descriptor


def append_synced(descriptor: int, text: str) -> None:
    """Append all of ``text`` or nothing to a file of `open_for_append`, and sync.

    Raises:
        OSError: if nothing was appended.
    """
    before, data = os.fstat(descriptor).st_size, memoryview(text.encode())
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):  # the error that led here says more
            os.ftruncate(descriptor, before)
        raise


def sync_to_disk(path: Path) -> None:
    """Flush the file or folder to the disk (fsync)."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
