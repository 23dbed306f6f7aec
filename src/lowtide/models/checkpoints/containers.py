"""Readers of both torch.save containers: zip archives and legacy pickle streams.

Everything else is refused: TorchScript, compressed archives, and tar archives, PyTorch's format
before version 0.1.10, which torch.load still unpacks into a folder, links included.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lowtide.models.checkpoints.pickle_objects import DamagedError, ObjectFactory, StorageRef
from lowtide.models.checkpoints.pickle_reader import read_pickle

ZIP = b"PK\x03\x04"
# The first opcode of every pickle since protocol 2, which torch.save always used.
PICKLE = b"\x80"
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_PIECE = 1 << 20


class UnacceptedError(ValueError):
    """Error for a kind of file that is not loaded; ``hint`` names the alternative."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class ZipCheckpoint:
    """Reader of the zip format of torch.save; ``content`` is the pickled object.

    Raises `DamagedError`, `UnacceptedError`, `ForbiddenNameError` and what zipfile raises.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._archive = zipfile.ZipFile(file)
        records = self._archive.infolist()
        _require_stored(records, size)
        self._top = records[0].filename.partition("/")[0] if records else ""
        self._swapped = self._is_swapped()
        self.content = read_pickle(
            io.BytesIO(self._archive.read(f"{self._top}/data.pkl")), ObjectFactory()
        )

    def read_storage(self, storage: StorageRef) -> Tensor:
        """Return all bytes of a storage's record as uint8 (bytes,).

        In this machine's byte order.
        """
        record = self._archive.getinfo(f"{self._top}/data/{storage.key}")
        if record.file_size != storage.numel * storage.dtype.itemsize:
            raise DamagedError(f"record {storage.key} does not have the size that its tensors need")
        with self._archive.open(record) as file:
            found = _filled(file, record.file_size)
        return found.view(-1, storage.dtype.itemsize).flip(1).view(-1) if self._swapped else found

    def _is_swapped(self) -> bool:
        name = f"{self._top}/byteorder"
        order = self._archive.read(name) if name in self._archive.NameToInfo else b"little"
        if order not in (b"little", b"big"):
            raise DamagedError("it has an unknown byte order")
        return order.decode() != sys.byteorder


class LegacyCheckpoint:
    """Reader of the legacy torch.save format: pickles, then storages.

    See `ZipCheckpoint`.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._maker = _Clipped(file, size), ObjectFactory()
        _require_no_tar(file)
        if self._next() != _MAGIC or self._next() != _VERSION:
            raise DamagedError("it does not start like a file of torch.save")
        self._next()  # sys_info of the machine that wrote it
        self.content, keys = self._next(), self._next()
        self._starts = {str(key): self._skip_storage(str(key)) for key in keys}

    def read_storage(self, storage: StorageRef) -> Tensor:
        """Return all bytes of a storage as uint8 (bytes,)."""
        whole = self._maker.storages[storage.key]
        self._file.seek(self._starts[storage.key])
        return _filled(self._file, whole.numel * whole.dtype.itemsize)

    def _next(self) -> Any:
        return read_pickle(self._file, self._maker)

    def _skip_storage(self, key: str) -> int:
        """Return the offset of a storage's values and seek to their end."""
        storage, count = self._maker.storages[key], self._file.read(8)
        if len(count) < 8 or struct.unpack("<q", count)[0] != storage.numel:
            raise DamagedError(f"storage {key} does not have the size that its tensors need")
        start = self._file.tell()
        self._file.seek(start + storage.numel * storage.dtype.itemsize)
        if self._file.tell() > self._file.size:
            raise DamagedError(f"storage {key} is truncated")
        return start


class _Clipped:
    """File whose reads allocate at most the file's size, whatever a pickle claims."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.size = file, size
        self.readline, self.seek, self.tell = file.readline, file.seek, file.tell
        self.readinto: Callable[[memoryview], int] = file.readinto  # type: ignore[attr-defined]

    def read(self, count: int, /) -> bytes:
        return self._file.read(min(count, max(self.size - self._file.tell(), 0)))


def _filled(file: Any, size: int) -> Tensor:
    """Read the next ``size`` bytes of a file as a uint8 tensor."""
    found = torch.empty(size, dtype=torch.uint8)
    rest = found.numpy().data
    while rest:
        count = file.readinto(rest[:_PIECE])
        if not count:
            raise DamagedError("it is truncated")
        rest = rest[count:]
    return found


def _require_stored(records: list[zipfile.ZipInfo], size: int) -> None:
    """Raise unless records are as torch.save writes them: stored, not overlapping."""
    if any(record.filename.endswith("constants.pkl") for record in records):
        raise UnacceptedError(
            "is TorchScript, which is a program", "save the state_dict of its model as .safetensors"
        )
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise UnacceptedError(
                f"has compressed records ({record.filename[:80]!r}), which torch.save never writes",
                "if you trust it, load it with torch.load and save it with torch.save",
            )
        if record.flag_bits & 1:
            raise DamagedError("its records are encrypted")
        if record.CRC == 0:  # written with torch.serialization.set_crc32_options(False)
            record.CRC = None  # type: ignore[assignment]
    if sum(record.file_size for record in records) > size:
        raise DamagedError("its records are larger than the file")


def _require_no_tar(file: BinaryIO) -> None:
    """Raise `UnacceptedError` for a tar archive, whose first block also fits a pickle."""
    block = file.read(512)
    file.seek(0)
    if block[257:262] == b"ustar":
        raise UnacceptedError(
            "is a tar archive, PyTorch's format before version 0.1.10",
            "if you trust it, load it with torch.load and save it with torch.save",
        )
