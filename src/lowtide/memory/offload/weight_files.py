"""Safetensors reader that fills preallocated tensors, and a matching writer.

The library maps a file and makes a tensor for each entry. Reading into a buffer takes a sixth of
the CPU time of copying out of such a mapping, and adds no mapped pages to the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from lowtide.core.errors import ModelError
from lowtide.core.units import MIB
from lowtide.memory.offload.weight_blocks import memory_order

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Bytes held at once of a tensor whose dtype or layout differs between file and model.
_CONVERSION_BYTES = 4 * MIB


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file: its dtype, its shape, and the byte where it starts."""

    file_index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class WeightFiles:
    """The tensors of one checkpoint in one or more files, read on demand.

    For use by one thread.

    Raises:
        ModelError: for a file that is missing, damaged or not a safetensors file.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [Path(path) for path in paths]
        self._entries: dict[str, _Entry] = {}
        self._handles: list[BinaryIO] = []
        for number, path in enumerate(self._paths):
            try:
                self._entries.update(_read_header(path, number))
                self._handles.append(path.open("rb", buffering=0))
            except (OSError, SafetensorError, ValueError) as error:
                self.close()
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the file."""
        return self._entries[name].shape

    def read(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into ``target``, a CPU tensor of the same shape.

        Values are converted to its dtype and layout.

        What needs no conversion is read straight into ``target``; the rest passes through 4 MiB, or
        one row of the first dimension where that is more.

        Raises:
            ModelError: if the file ends too early.
        """
        entry = self._entries[name]
        file = self._handles[entry.file_index]
        file.seek(entry.offset)
        if entry.dtype == target.dtype and target.is_contiguous():
            self._fill(file, target, name)
            return
        rows = target if target.dim() else target.view(1)
        row_bytes = math.prod(rows.shape[1:]) * entry.dtype.itemsize
        count = max(1, _CONVERSION_BYTES // max(1, row_bytes))
        passing = torch.empty((min(count, len(rows)), *rows.shape[1:]), dtype=entry.dtype)
        for first in range(0, len(rows), count):
            part = passing[: len(rows) - first]
            self._fill(file, part, name)
            rows[first : first + count].copy_(part)

    def _fill(self, file: BinaryIO, target: torch.Tensor, name: str) -> None:
        memory, got = _byte_view(target), 0
        while got < len(memory):
            count = file.readinto(memory[got:])  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                path = self._paths[self._entries[name].file_index]
                raise ModelError(
                    f"{path} ends in the middle of {name}: it was changed or truncated"
                )
            got += count

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        while self._handles:
            self._handles.pop().close()


def _read_header(path: Path, file_index: int) -> dict[str, _Entry]:
    with safe_open(path, framework="pt"):
        pass  # the library checks the header: sizes, overlaps, and that the file is complete
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    unknown = {entry["dtype"] for entry in header.values()} - set(_DTYPES)
    if unknown:
        raise ValueError(f"unsupported dtype {', '.join(sorted(unknown))}")
    return {
        name: _Entry(
            file_index,
            _DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def write_weights(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write tensors of any shape to a safetensors file, each in its memory order.

    A tensor that is not contiguous is thus stored with its dimensions permuted, and read back into
    the same permutation of its slot; `safetensors.torch.save_file` takes only contiguous ones.

    Raises:
        OSError: if the disk is full.
        ModelError: for a dtype that the format does not have.
    """
    header, end = {}, 0
    for name, tensor in tensors:
        if tensor.dtype not in _DTYPE_NAMES:
            raise ModelError(
                f"{name} is {tensor.dtype}, which safetensors files cannot store",
                hint="keep it resident",
            )
        shape = [tensor.shape[axis] for axis in memory_order(tensor)]
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            file.write(_byte_view(tensor.detach().permute(memory_order(tensor)).cpu()))


def _byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor."""
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)  # pyright: ignore[reportArgumentType]
