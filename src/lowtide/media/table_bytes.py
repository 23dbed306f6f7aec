"""Bytes of table files: plain or packed files, standard input, and the encoding of their text."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lowtide.core.errors import InputError
from lowtide.core.input_file import require_input
from lowtide.core.units import format_bytes

STDIN = "-"
EXCEL = (".xlsx", ".xlsm")
# Bytes that a table takes from a byte of its file to a forecast: measured were 8 to 11.
BYTES_PER_BYTE = 10
_CHUNK = 1 << 20
_HINTS = {
    ".xls": "save it as .xlsx or CSV",
    ".ods": "save it as .xlsx or CSV",
    ".json": "in Python: pandas.read_json(FILE).to_csv('table.csv')",
    ".jsonl": "in Python: pandas.read_json(FILE, lines=True).to_csv('table.csv')",
    ".feather": "in Python: pandas.read_feather(FILE).to_parquet('table.parquet')",
}


@dataclass(frozen=True)
class TableBytes:
    """A file's bytes, unpacked: in memory where they are packed or of standard input.

    Attributes:
        path: The file.
        suffix: What the name of the unpacked file ends with, in lower case.
        held: Its bytes in memory; None where the file itself is read.
    """

    path: Path
    suffix: str
    held: bytes | None = None

    @classmethod
    def of(cls, path: Path, room: int) -> TableBytes:
        """Look at a file, or unpack it.

        Args:
            path: The file; ``-`` is standard input.
            room: Bytes of memory that there are for the table and what is made of it.

        Raises:
            InputError: It is not there, damaged, of another kind, or takes more than ``room``.
        """
        if str(path) == STDIN:
            return cls(path, "", _bounded(path, sys.stdin.buffer, room))
        if str(path).startswith(("http:/", "https:/", "s3:/", "ftp:/")):
            raise InputError(
                f"{path}: addresses are not fetched", hint="download it and name the file"
            )
        size, suffix = require_input(path).st_size, path.suffix.lower()
        if suffix in _HINTS:
            raise InputError(f"{path}: tables are not read as {suffix}", hint=_HINTS[suffix])
        try:
            if suffix == ".gz":
                with gzip.open(path) as file:
                    return cls(path, Path(path.stem).suffix.lower(), _bounded(path, file, room))
            if suffix == ".zip":
                return cls._unzipped(path, room)
            if suffix in EXCEL:
                with zipfile.ZipFile(path) as parts:
                    size = sum(part.file_size for part in parts.infolist())
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: is damaged, or no {suffix} file") from error
        if suffix not in (".parquet", ".pq"):
            require_room(path, room, f"{size:,} bytes", size * BYTES_PER_BYTE)
        return cls(path, suffix)

    @classmethod
    def _unzipped(cls, path: Path, room: int) -> TableBytes:
        with zipfile.ZipFile(path) as parts:
            names = [one for one in parts.namelist() if not one.startswith(("__MACOSX", "."))]
            names = [one for one in names if not one.endswith("/")]
            if len(names) != 1:
                raise InputError(
                    f"{path}: has {len(names)} files, and a table is one", hint="unpack it"
                )
            with parts.open(names[0]) as file:
                return cls(path, Path(names[0]).suffix.lower(), _bounded(path, file, room))

    def open(self) -> IO[bytes]:
        """Open the bytes from their beginning."""
        return self.path.open("rb") if self.held is None else io.BytesIO(self.held)

    def encoding(self) -> str:
        """Return the encoding of the text: UTF-8, UTF-16, or Windows-1252 where it is neither."""
        with self.open() as file:
            start = file.read(4096)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        # Without a mark: every other byte of Latin text is 0.
        for encoding, zeros in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
            if len(zeros) > 1 and zeros.count(0) > 0.9 * len(zeros):
                return encoding
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with self.open() as file:
                while chunk := file.read(_CHUNK):
                    decoder.decode(chunk)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return "cp1252"
        return "utf-8-sig"


def require_room(path: Path, room: int, size: str, needed: int) -> None:
    """Refuse a table that needs more than the memory there is, by `InputError`."""
    if needed > room:
        raise InputError(
            f"{path}: {size} take up to {format_bytes(needed)} of memory, and there are"
            f" {format_bytes(room)}",
            hint="give fewer rows or columns, such as the last years or coarser steps",
        )


def _bounded(path: Path, file: IO[bytes] | gzip.GzipFile, room: int) -> bytes:
    """Read bytes that are not known beforehand, and no more than there is room for."""
    most = min(room // BYTES_PER_BYTE, sys.maxsize - 1)
    parts, size = [], 0
    while size <= most and (part := file.read(_CHUNK)):
        parts.append(part)
        size += len(part)
    if size > most:
        require_room(path, room, f"more than {most:,} bytes", room + 1)
    return b"".join(parts)


def is_stdin(data: object) -> bool:
    """Return whether a table is standard input."""
    return isinstance(data, str | os.PathLike) and str(data) == STDIN
