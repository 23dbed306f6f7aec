"""Readers of both torch.save containers: zip archives and legacy pickle streams.

Everything else is refused: TorchScript, compressed archives, and tar archives, PyTorch's format
before version 0.1.10, which torch.load still unpacks into a folder, links included.

A pickle is a program: Python's unpickler imports and calls whatever it names. `read_pickle` knows
the opcodes that torch.save writes, and calls nothing. A name is on a short allowlist or refused; a
tensor becomes a reference to its storage. No opcode makes more than one small object, so that a
stream needs memory in proportion to its length. PyTorch's `weights_only` reader refuses protocol 4
and common harmless names, and its memory has no bound by the file's size: tuples that double one
another never end.
"""

from __future__ import annotations

import io
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lowtide.models.checkpoints.pickle_objects import (
    DamagedCheckpointError,
    ForbiddenNameError,
    OpaqueObject,
    PickleObjectFactory,
    StorageRef,
    plain_key,
)

ZIP = b"PK\x03\x04"
# The first opcode of every pickle since protocol 2, which torch.save always used.
PICKLE = b"\x80"
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_PIECE = 1 << 20

# The largest checkpoints, optimizer states included, have a few hundred thousand.
_MOST_INSTRUCTIONS = 2_000_000
_LITERALS = """
    INT BININT BININT1 BININT2 LONG1 BINFLOAT BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
""".split()


class UnacceptedFileError(ValueError):
    """Error for a kind of file that is not loaded; ``hint`` names the alternative."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class ZipCheckpoint:
    """Reader of the zip format of torch.save; ``content`` is the pickled object.

    Raises `DamagedCheckpointError`, `UnacceptedFileError`, `ForbiddenNameError` and what zipfile
    raises.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._archive = zipfile.ZipFile(file)
        records = self._archive.infolist()
        _require_stored(records, size)
        self._top = records[0].filename.partition("/")[0] if records else ""
        self._swapped = self._is_swapped()
        self.content = read_pickle(
            io.BytesIO(self._archive.read(f"{self._top}/data.pkl")), PickleObjectFactory()
        )

    def read_storage(self, storage: StorageRef) -> Tensor:
        """Return all bytes of a storage's record as uint8 (bytes,).

        In this machine's byte order.
        """
        record = self._archive.getinfo(f"{self._top}/data/{storage.key}")
        if record.file_size != storage.numel * storage.dtype.itemsize:
            raise DamagedCheckpointError(
                f"record {storage.key} does not have the size that its tensors need"
            )
        with self._archive.open(record) as file:
            found = _filled(file, record.file_size)
        return found.view(-1, storage.dtype.itemsize).flip(1).view(-1) if self._swapped else found

    def _is_swapped(self) -> bool:
        name = f"{self._top}/byteorder"
        order = self._archive.read(name) if name in self._archive.NameToInfo else b"little"
        if order not in (b"little", b"big"):
            raise DamagedCheckpointError("it has an unknown byte order")
        return order.decode() != sys.byteorder


class LegacyCheckpoint:
    """Reader of the legacy torch.save format: pickles, then storages.

    See `ZipCheckpoint`.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._maker = _Clipped(file, size), PickleObjectFactory()
        _require_no_tar(file)
        if self._next() != _MAGIC or self._next() != _VERSION:
            raise DamagedCheckpointError("it does not start like a file of torch.save")
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
            raise DamagedCheckpointError(
                f"storage {key} does not have the size that its tensors need"
            )
        start = self._file.tell()
        self._file.seek(start + storage.numel * storage.dtype.itemsize)
        if self._file.tell() > self._file.size:
            raise DamagedCheckpointError(f"storage {key} is truncated")
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
            raise DamagedCheckpointError("it is truncated")
        rest = rest[count:]
    return found


def _require_stored(records: list[zipfile.ZipInfo], size: int) -> None:
    """Raise unless records are as torch.save writes them: stored, not overlapping."""
    if any(record.filename.endswith("constants.pkl") for record in records):
        raise UnacceptedFileError(
            "is TorchScript, which is a program", "save the state_dict of its model as .safetensors"
        )
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise UnacceptedFileError(
                f"has compressed records ({record.filename[:80]!r}), which torch.save never writes",
                "if you trust it, load it with torch.load and save it with torch.save",
            )
        if record.flag_bits & 1:
            raise DamagedCheckpointError("its records are encrypted")
        if record.CRC == 0:  # written with torch.serialization.set_crc32_options(False)
            record.CRC = None  # type: ignore[assignment]
    if sum(record.file_size for record in records) > size:
        raise DamagedCheckpointError("its records are larger than the file")


def _require_no_tar(file: BinaryIO) -> None:
    """Raise `UnacceptedFileError` for a tar archive, whose first block also fits a pickle."""
    block = file.read(512)
    file.seek(0)
    if block[257:262] == b"ustar":
        raise UnacceptedFileError(
            "is a tar archive, PyTorch's format before version 0.1.10",
            "if you trust it, load it with torch.load and save it with torch.save",
        )


def read_pickle(file: Any, maker: PickleObjectFactory) -> Any:
    """Read the object pickled at the file's position, without unpickling.

    ``read`` of ``file`` must not allocate past its end. Dictionaries, lists, tuples and plain
    values, with `TensorRef` for tensors and `OpaqueObject` for harmless objects. Subclasses of dict
    become dict. Raises `ForbiddenNameError` and `DamagedCheckpointError`.
    """
    machine = _Machine(maker)
    try:
        return machine.run(file)
    except (ForbiddenNameError, DamagedCheckpointError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # What a wrong order or count of opcodes raises here and in pickletools.
        raise DamagedCheckpointError(f"its pickle is broken ({type(error).__name__})") from error


class _Machine:
    """Stack machine that interprets the opcodes in `_INSTRUCTIONS`."""

    def __init__(self, maker: PickleObjectFactory) -> None:
        self.maker = maker
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, file: Any) -> Any:
        for done, (instruction, value, _) in enumerate(pickletools.genops(file)):
            if instruction.name == "STOP":
                return self.stack.pop()
            if done == _MOST_INSTRUCTIONS:
                raise DamagedCheckpointError(f"it has more than {_MOST_INSTRUCTIONS} instructions")
            if instruction.name not in _INSTRUCTIONS:
                raise DamagedCheckpointError(
                    f"torch.save does not write the instruction {instruction.name}"
                )
            _INSTRUCTIONS[instruction.name](self, value)
        raise DamagedCheckpointError("its pickle has no STOP instruction")

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def make_tuple(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise DamagedCheckpointError("a tuple lacks items")
        self.stack[-count:] = [items]

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is not OpaqueObject:
            raise DamagedCheckpointError("it appends to an object that is not a list")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[plain_key(key)] = value
        elif type(target) is not OpaqueObject:
            raise DamagedCheckpointError("it sets items of an object that is not a dictionary")

    def reduce(self, has_kwargs: bool = False) -> None:
        if has_kwargs:
            self.stack.pop()
        given = self.stack.pop()
        self.push(self.maker.build(self.stack.pop(), given))


_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(_LITERALS, _Machine.push),
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_SET": lambda machine, _: machine.push(OpaqueObject("builtins.set")),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.pop_to_mark(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "ADDITEMS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "FROZENSET": lambda machine, _: machine.push(
        (machine.pop_to_mark(), OpaqueObject("frozenset"))[1]
    ),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "BINPUT": _Machine.memoize,
    "LONG_BINPUT": _Machine.memoize,
    "MEMOIZE": lambda machine, _: machine.memoize(len(machine.memo)),
    "GLOBAL": lambda machine, value: machine.push(machine.maker.resolve_name(*value.split(" ", 1))),
    "STACK_GLOBAL": lambda machine, _: machine.push(
        machine.maker.resolve_name(machine.stack.pop(-2), machine.stack.pop())
    ),
    "REDUCE": lambda machine, _: machine.reduce(),
    "NEWOBJ": lambda machine, _: machine.reduce(),
    "NEWOBJ_EX": lambda machine, _: machine.reduce(has_kwargs=True),
    "BUILD": lambda machine, _: machine.stack.pop(),  # drop attributes: weights have none
    "BINPERSID": lambda machine, _: machine.push(
        machine.maker.resolve_storage(machine.stack.pop())
    ),
}
